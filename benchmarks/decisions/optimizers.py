"""8- and 4-bit AdamW beside torchao's: state bytes, distance from fp32 AdamW, CPU time, sharding, checkpoints.

    pip install torchao
    PYTHONPATH=src:tests python benchmarks/decisions/optimizers.py OUT.json [sharded uneven rule cost accuracy]

A Llama of 0.9M parameters learns the demo's pairs for 100 steps with fp32 AdamW and with each contestant, from the same
weights and batches. `distance` is ‖p − p_fp32‖ / ‖p_fp32 − p_0‖: 0 is fp32's result, 1 is as far from it as the start.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS, RATE, SEEDS = 100, 1e-3, (0, 1, 2)
BETAS = (0.9, 0.95)


def contestants() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Each optimizer over given parameters, with the same rate and betas."""
    from torchao.optim import AdamW4bit, AdamW8bit

    from shardwise.optim.elementwise import Elementwise
    from shardwise.optim.rules import rule_of

    def ours(kind: Any) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda params: Elementwise(params, rule_of("adamw", BETAS), kind, lr=RATE, betas=BETAS)

    def torchaos(kind: Any) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda params: kind(params, lr=RATE, betas=BETAS, weight_decay=0.0)

    return {
        "fp32": lambda params: torch.optim.AdamW(params, lr=RATE, betas=BETAS, weight_decay=0.0),
        "ours 8-bit": ours("8bit"),
        "torchao 8-bit": torchaos(AdamW8bit),
        "ours 4-bit": ours("4bit"),
        "torchao 4-bit": torchaos(AdamW4bit),
    }


def model(seed: int, hidden: int = 128) -> Any:
    """A small Llama; every matrix is a multiple of torchao's blocks."""
    from support.tiny import LLAMA
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**{k: v for k, v in (LLAMA | sizes).items() if k != "model_type"}))


def batches(folder: Path, seed: int) -> list[torch.Tensor]:
    """[8, 64] tokens per step, from the demo's pairs."""
    from support.tiny import PAIRS, tokenizer_folder
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(folder / "tokenizer"))
    ids = torch.tensor(tokenizer(PAIRS.read_text())["input_ids"]) % 512
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - 64, (STEPS, 8), generator=generator)
    return [torch.stack([ids[s : s + 64] for s in row]) for row in starts.tolist()]


def train(make: Callable[[Any], torch.optim.Optimizer], data: list[torch.Tensor], seed: int) -> tuple[Any, list[float]]:
    """The trained model and its losses."""
    trained = model(seed)
    optimizer = make(trained.parameters())
    losses = []
    for batch in data:
        loss = trained(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return trained, losses


def flat(trained: Any) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in trained.parameters()])


def tensors(value: Any) -> list[torch.Tensor]:
    """The plain tensors that a state consists of."""
    if isinstance(value, DTensor):
        return tensors(value._local_tensor)
    if hasattr(value, "__tensor_flatten__"):
        return [part for name in value.__tensor_flatten__()[0] for part in tensors(getattr(value, name))]
    return [value]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states."""
    states = [t for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) for t in tensors(v)]
    return sum(t.numel() * t.element_size() for t in states)


def accuracy(folder: Path) -> dict[str, Any]:
    """Loss of the last 10 steps and distance from fp32 AdamW, by seed."""
    results: dict[str, Any] = {}
    for seed in SEEDS:
        data, begin = batches(folder, seed), flat(model(seed))
        reference = None
        for name, make in contestants().items():
            trained, losses = train(make, data, seed)
            end = flat(trained)
            reference = end if reference is None else reference
            row = results.setdefault(name, {"loss": [], "distance": []})
            row["loss"].append(sum(losses[-10:]) / 10)
            row["distance"].append(((end - reference).norm() / (reference - begin).norm()).item())
            print(f"seed {seed}, {name}: loss {row['loss'][-1]:.4f}, distance {row['distance'][-1]:.4f}", flush=True)
    return results


def cost() -> dict[str, Any]:
    """Bytes of state per parameter and CPU seconds per step of 12.6M parameters; contestants take turns."""
    made = {}
    for name, make in contestants().items():
        params = [torch.nn.Parameter(torch.randn(1024, 1024) * 0.02) for _ in range(12)]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        made[name] = make(params), sum(p.numel() for p in params)
        began = time.process_time()
        made[name][0].step()  # torchao compiles here
        print(name, "first step", round(time.process_time() - began, 2), "s of this process", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(7):
        for name, (optimizer, _) in made.items():
            began = time.process_time()
            optimizer.step()
            seconds[name].append(time.process_time() - began)
    return {
        name: {"bytes": state_bytes(optimizer) / count, "ms": 1e3 * sorted(seconds[name])[3]}
        for name, (optimizer, count) in made.items()
    }


def _ranks(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Ten steps over shards, a checkpoint by name after five; what happened to each contestant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = sharded(name, Path(folder), world)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    if rank == 0:
        torch.save(results, f"{folder}/results{world}")
    dist.destroy_process_group()


def sharded(name: str, folder: Path, world: int) -> dict[str, Any]:
    """Parameters after ten steps; on one rank the checkpoint of several ranks is read after five, by name."""
    mesh = init_device_mesh("cpu", (world,))
    trained = model(0)
    for layer in trained.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    optimizer = contestants()[name](trained.parameters())

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for p in trained.parameters():
                full = torch.randn(p.shape, generator=generator) * 1e-3
                rows = torch.chunk(full, world)[mesh.get_local_rank()]
                p.grad = DTensor.from_local(rows.contiguous(), mesh, p.placements, shape=p.shape, stride=p.stride())
            optimizer.step()

    def full() -> dict[str, torch.Tensor]:
        return {n: p.full_tensor().detach().clone() for n, p in trained.named_parameters()}

    steps(0, 5)
    half = full()
    place = folder / name.replace(" ", "-")
    if world > 1:
        save({"optimizer": get_optimizer_state_dict(trained, optimizer)}, checkpoint_id=place)
        steps(5, 10)
        count = sum(p.to_local().numel() for p in trained.parameters())
        return {"half": half, "end": full(), "bytes": state_bytes(optimizer) / count}
    steps(5, 10)
    alone = full()
    resumed = None
    if place.exists():
        state = {"optimizer": get_optimizer_state_dict(trained, optimizer)}
        try:
            load(state, checkpoint_id=place)
            set_optimizer_state_dict(trained, optimizer, state["optimizer"])
            with torch.no_grad():
                for n, p in trained.named_parameters():
                    p.copy_(DTensor.from_local(half[n], mesh, p.placements))
            steps(5, 10)
            resumed = full()
        except BaseException as error:  # torch's error of checkpoints is no Exception
            resumed = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
    return {"half": half, "end": alone, "resumed": resumed}


def over_ranks(folder: Path, world: int, names: list[str]) -> dict[str, Any]:
    """Whether several ranks equal one, and whether their checkpoint resumes on one rank, by name."""
    found: dict[int, Any] = {}
    for ranks in (world, 1):
        mp.spawn(_ranks, (ranks, str(folder), names), nprocs=ranks)
        found[ranks] = torch.load(folder / f"results{ranks}")

    def apart(a: Any, b: Any) -> Any:
        if isinstance(a, str) or isinstance(b, str) or b is None:
            return a if isinstance(a, str) else b
        return max((a[n] - b[n]).abs().max().item() for n in a)

    results = {}
    for name in names:
        many, one = found[world][name], found[1][name]
        if isinstance(many, str) or isinstance(one, str):
            pairs = ((f"{world} ranks", many), ("1 rank", one))
            results[name] = {ranks: got if isinstance(got, str) else "ran" for ranks, got in pairs}
            continue
        results[name] = {
            "against one rank": apart(many["end"], one["end"]),
            "resumed on one rank": apart(many["end"], one["resumed"]),
            "bytes per parameter, rank 0": many["bytes"],
        }
    return results


def rule() -> dict[int, float]:
    """Share of SmolLM2-135M's parameters on rank 0 whose states torchao keeps in fp32, by number of ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwise.config.schema import Model
    from shardwise.nn.models.source import find_model

    config = AutoConfig.from_pretrained(find_model(Model(name="smollm2-135m-instruct")).weights)
    with torch.device("meta"):
        shapes = [p.shape for p in AutoModelForCausalLM.from_config(config).parameters()]
    shares = {}
    for ranks in range(1, 9):
        local = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
        shares[ranks] = sum(n for n in local if n < 4096 or n % 256) / sum(local)  # torchao.optim, _new_buffer
    return shares


def main() -> None:
    """Prints and writes all figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Any]] = {
            "sharded": lambda: over_ranks(folder, 2, list(contestants())),
            "uneven": lambda: over_ranks(folder, 3, ["ours 8-bit", "torchao 8-bit"]),
            "rule": rule,
            "cost": cost,
            "accuracy": lambda: accuracy(folder),
        }
        figures = {}
        for part in sys.argv[2:] or parts:
            figures[part] = parts[part]()
            print(part, json.dumps(figures[part], indent=1), flush=True)
            for store in folder.glob("store*"):
                store.unlink()
    Path(sys.argv[1]).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
