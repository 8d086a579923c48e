"""Uses vLLM as the engine of `shardwise serve`, if it is installed and there is a GPU for it.

Its server has the same API, so this process is replaced by it. What it does not support (a rate limit, several models,
checkpoints that were not exported) stays with our engine; with `--engine vllm` such a request is rejected.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.core.errors import UserError

if TYPE_CHECKING:
    from shardwise.serve.command import ServeOptions


def wanted(options: ServeOptions, places: dict[str, str]) -> bool:
    """Whether to use vLLM."""
    if options.engine not in ("auto", "vllm", "transformers"):
        raise UserError("--engine", options.engine, "is not known", "use auto, vllm or transformers")
    if options.engine == "transformers":
        return False
    reason = _unfit(options, places)
    if options.engine == "vllm" and reason is not None:
        raise UserError("--engine", "vllm", *reason)
    return reason is None


def _unfit(options: ServeOptions, places: dict[str, str]) -> tuple[str, str] | None:
    """Why vLLM cannot be used, and what to do instead."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed", "pip install vllm, or use --engine transformers"
    if not torch.cuda.is_available():
        return "needs a GPU", "use --engine transformers"
    unsupported = {
        "several models": len(places) > 1,
        "--rate": options.rate is not None,
        "--log-prompts": options.log_prompts,
    }
    for option, is_set in unsupported.items():
        if is_set:
            return f"does not offer {option} here", "leave it out, or use --engine transformers"
    if _folder(*places.values()) is None:
        return "needs a Hugging Face folder", "run shardwise export first, or use --engine transformers"
    return None


def _folder(place: str) -> Path | None:
    """The Hugging Face folder of an export or a finished run."""
    path = Path(place).expanduser()
    return next((folder for folder in (path / "model", path) if (folder / "config.json").is_file()), None)


def command_line(options: ServeOptions, places: dict[str, str]) -> list[str]:
    """Returns the command line of vLLM's server with the same options."""
    (name, place), = places.items()  # fmt: skip
    longest = json.dumps({"max_new_tokens": options.max_tokens})
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(_folder(place)),
        "--served-model-name", name, "--host", options.host, "--port", str(options.port),
        "--max-num-seqs", str(options.max_concurrent), "--override-generation-config", longest,
    ]  # fmt: skip


def run(options: ServeOptions, places: dict[str, str], key: str | None) -> None:
    """Replaces this process with vLLM's server, after checking that the tokenizer is the one trained with."""
    from transformers import AutoTokenizer

    from shardwise.data.fingerprint import check_fingerprint

    folder = _folder(*places.values())
    assert folder is not None
    if not options.changed_tokenizer:
        check_fingerprint(folder, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    if key is not None:
        os.environ["VLLM_API_KEY"] = key
    print(f"serving {', '.join(places)} with vLLM at http://{options.host}:{options.port}/v1", flush=True)
    line = command_line(options, places)
    os.execv(line[0], line)
