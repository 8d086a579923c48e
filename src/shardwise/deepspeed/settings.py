"""A parsed DeepSpeed config: the engine's settings, the batch sizes, and the account of every key.

The table of `shardwise.config.deepspeed` decides on every key but `optimizer` and `scheduler`: those two are built here
as DeepSpeed builds them, over the script's own parameter groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.deepspeed import line, translate
from shardwise.config.deepspeed import read_config as read_file
from shardwise.config.deepspeed.plan import default_of
from shardwise.core.errors import UserError
from shardwise.train.engine import EngineConfig

BUILT_HERE = ("optimizer", "scheduler")
TAKEN = ("train.batch_size", "train.micro_batch_size", "train.max_grad_norm", "train.schedule", "train.warmup",
         "log.every",
         "log.breakdown", "log.comms")  # fmt: skip


@dataclass(frozen=True)
class EngineBatchSizes:
    """Samples per update, samples per rank and forward, and forwards per update."""

    train: int
    micro: int
    accumulate: int


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The original config, the settings of `shardwise.initialize`, and one account line per key."""

    config: dict[str, Any]
    engine: dict[str, Any]
    batch: EngineBatchSizes
    account: tuple[tuple[str, str, str], ...]


def read_config(config: Any, args: Any) -> dict[str, Any]:
    """The dictionary of `config` or `args.deepspeed_config`; exactly one of them must be given."""
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        problem = "is given besides args.deepspeed_config"
        raise UserError("config", None, problem, "give one: the argument of initialize, or --deepspeed_config")
    config = from_args if config is None else config
    if config is None:
        raise UserError("config", None, "is missing", "pass config=… to initialize, or --deepspeed_config FILE")
    if isinstance(config, dict):
        return dict(config)
    if not isinstance(config, (str, Path)):
        problem = f"is a {type(config).__name__}, neither a dictionary nor a path"
        raise UserError("config", config, problem, "pass a DeepSpeed config: a dictionary, or the path of a JSON file")
    try:
        return read_file(Path(str(config)).expanduser())
    except UserError as error:
        raise UserError("deepspeed_config", error.value, error.problem, error.remedy) from None


def settle(config: dict[str, Any], ranks: int) -> DeepSpeedSettings:
    """Translates the config; raises UserError for keys that are unknown, rejected, or need our training loop."""
    rest = {key: value for key, value in config.items() if key not in BUILT_HERE}
    done = translate(rest, ranks=ranks, run={"output": "."}, file="config")  # where the engine puts what goes to disk
    sizes = done.batch
    if sizes.train is None or sizes.micro is None or sizes.rounds is None:
        remedy = "give a number: there is nothing here to resolve it by"
        raise UserError("train_micro_batch_size_per_gpu", "auto", "is not decided", remedy)
    batch = EngineBatchSizes(sizes.train, sizes.micro, sizes.rounds)
    values = {key: value for key, value in done.values.items() if key in EngineConfig.model_fields}
    values["gradient_accumulation_steps"] = batch.accumulate
    values["max_grad_norm"] = done.values.get("train", {}).get("max_grad_norm")
    log = done.values.get("log", {})
    values["breakdown"] = bool(log.get("breakdown") or log.get("comms"))
    account = [line(entry) for entry in done.account if entry.given]
    for path, value in _leaves({k: v for k, v in done.values.items() if k not in values}):
        if path in TAKEN or value == default_of(path):
            continue
        if not path.startswith("log."):
            problem = f"sets {path}: {value}, which has no place in a script's own loop"
            raise UserError(
                f"config: {done.sources.get(path, path)}", None, problem, "remove it, or use shardwise train"
            )
        ignored = f"{done.sources.get(path, path)}: {value}"
        account = [row for row in account if not row[0].startswith(ignored.split(":")[0])]
        account.append((ignored, "no effect", "reports are the script's own"))
    return DeepSpeedSettings(config, values, batch, tuple(account))


def print_account(settings: DeepSpeedSettings) -> None:
    """Prints how each key was handled, in three columns."""
    built_here = [(key, "honoured", f"{(settings.config.get(key) or {}).get('type')}, over the script's parameters")
             for key in BUILT_HERE if settings.config.get(key)]  # fmt: skip
    rows = [*built_here, *settings.account]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)] if rows else [0, 0]
    print("DeepSpeed config:", flush=True)
    for key, verdict, text in rows:
        print(f"  {key:{widths[0]}}  {verdict:{widths[1]}}  {text}", flush=True)


def _leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        leaves += _leaves(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return leaves
