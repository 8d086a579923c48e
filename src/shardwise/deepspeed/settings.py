"""A DeepSpeed config, read: the file or dictionary, the three batch sizes, and what the engine is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.engine import EngineConfig
from shardwise.errors import UserError

TRAIN, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples per update, per rank and forward, and forwards per update."""

    train: int
    micro: int
    accumulate: int


def read_config(config: Any, args: Any) -> dict[str, Any]:
    """The dictionary behind `config` or `args.deepspeed_config`; exactly one of them must be given."""
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        problem = "is given besides args.deepspeed_config"
        raise UserError("config", None, problem, "give one: the argument of initialize, or --deepspeed_config")
    config = from_args if config is None else config
    if config is None:
        raise UserError("config", None, "is missing", "pass config=… to initialize, or --deepspeed_config FILE")
    if isinstance(config, dict):
        return dict(config)
    path = Path(str(config)).expanduser()
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError("deepspeed_config", str(path), f"cannot be read ({error.strerror})", "check the path") from None
    except ValueError as error:
        raise UserError("deepspeed_config", str(path), f"is no valid JSON ({error})", "mend the file") from None
    if not isinstance(values, dict):
        raise UserError("deepspeed_config", str(path), "holds no JSON object", "see DeepSpeed's configuration page")
    return values


def batch_of(config: dict[str, Any], ranks: int) -> Batch:
    """The three batch sizes, of which any two (or one of the batch sizes) give the rest."""
    found = {}
    for key in (TRAIN, MICRO, ACCUMULATE):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            remedy = "give a number; `auto` is for the Hugging Face Trainer, which fills it in"
            raise UserError(key, value, "must be a whole number above 0", remedy)
        found[key] = value
    train, micro, accumulate = found[TRAIN], found[MICRO], found[ACCUMULATE]
    if micro is None and train is None:
        raise UserError(TRAIN, None, f"neither it nor {MICRO} is given", f"add e.g. {MICRO}: 4")
    if micro is None:
        assert train is not None
        micro = train // ((accumulate or 1) * ranks)
    if accumulate is None:
        accumulate = 1 if train is None else train // (micro * ranks) if micro else 0
    train = micro * accumulate * ranks if train is None else train
    if not micro or not accumulate or train != micro * accumulate * ranks:
        problem = f"is not {MICRO} ({micro}) × {ACCUMULATE} ({accumulate}) × {ranks} ranks"
        raise UserError(TRAIN, train, problem, "change one of them, or leave one out to have it computed")
    return Batch(train, micro, accumulate)


def block(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """A section of the config under the first of its names that is there; empty where there is none."""
    for name in names:
        if isinstance(value := config.get(name), dict):
            return value
    return {}


def engine_values(config: dict[str, Any], batch: Batch, ranks: int) -> dict[str, Any]:
    """What `EngineConfig` takes, from the config."""
    zero = block(config, "zero_optimization")
    fp16, bf16 = block(config, "fp16").get("enabled"), block(config, "bf16", "bfloat16").get("enabled")
    return {
        "parallel": {"zero": int(zero.get("stage", 0))},
        "precision": "fp16" if fp16 else "bf16" if bf16 else "fp32",
        "accumulate": batch.accumulate,
        "clip": config.get("gradient_clipping") or None,
    }


def known_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The sections that the engine has."""
    return {key: value for key, value in values.items() if key in EngineConfig.model_fields}
