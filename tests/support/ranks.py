"""Runs a function on several ranks: real processes, gloo, one result per rank; a failure shows the rank's traceback.

Processes are forked from a server that has imported what they need once: four ranks do not pay four imports.
The function must live in a module of `support`, where the processes can find it by name.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "transformers.generation",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.tokenization_utils_tokenizers",
    "shardwise.foresight.prepare",
    "shardwise.parallel.parallelize",
    "shardwise.train.engine",
    "shardwise.train.loop",
    "support.scenarios",
    "support.frozen_heap",
]


def forking() -> Any:
    """Starts processes that have imported what is preloaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(
    function: Callable[..., Any], rank: int, ranks: int, folder: str, env: dict[str, str], args: tuple[Any, ...]
) -> None:
    import faulthandler

    import torch

    for name in PRELOADED:  # there already; the server says nothing of what it could not import
        import_module(name)
    faulthandler.enable()  # a crash in native code shows where Python was
    os.environ.update(env)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    out = Path(folder) / f"{rank}.out"
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        result = ("ok", function(*args))
        dist.barrier()
    except BaseException:
        result = ("failed", traceback.format_exc())
    torch.save(result, out.with_suffix(".tmp"))
    out.with_suffix(".tmp").rename(out)
    os._exit(0)


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 240, env: dict[str, str] | None = None
) -> list[Any]:
    """The function's result on each rank, in order."""
    import torch

    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=_rank, args=(function, r, ranks, folder, env or {}, args)) for r in range(ranks)
        ]
        for child in children:
            child.start()
        outs = [Path(folder) / f"{r}.out" for r in range(ranks)]
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < ranks and time.monotonic() < deadline:
            for rank, out in enumerate(outs):
                if rank not in results and out.exists():
                    results[rank] = torch.load(out, weights_only=False)
            if any(kind == "failed" for kind, _ in results.values()):
                break
            dead = [r for r, c in enumerate(children) if not c.is_alive() and r not in results and not outs[r].exists()]
            if dead:
                break
            time.sleep(0.02)
        for child in children:
            child.join(2)
            if child.is_alive():
                child.kill()
                child.join()
    failures = [f"rank {r}:\n{text}" for r, (kind, text) in results.items() if kind == "failed"]
    assert not failures, "\n".join(failures)
    missing = {r: children[r].exitcode for r in range(ranks) if r not in results}
    assert not missing, f"ranks that gave no result, with exit codes: {missing}"
    return [results[r][1] for r in range(ranks)]
