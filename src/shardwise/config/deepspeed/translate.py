"""Translates a DeepSpeed config to our values, with an account of every key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.advanced import written
from shardwise.config.deepspeed import rules
from shardwise.config.deepspeed.batch import BatchSizes, put_batch
from shardwise.config.deepspeed.plan import KeyAccount, NoEffect, PartialTranslation, Verdict, show
from shardwise.config.deepspeed.table import TABLE, Key
from shardwise.config.explain import near_file
from shardwise.config.paths import ABSENT, find
from shardwise.core.errors import UserError, together


@dataclass(frozen=True)
class Translation:
    """A translated DeepSpeed config.

    `values` has RUN.yaml's shape and holds only what the config decides; `account` has every key of the config and the
    defaults adopted from DeepSpeed; `sources` maps each of our values, by dotted path, to the key it came from.
    """

    values: dict[str, Any]
    account: tuple[KeyAccount, ...]
    batch: BatchSizes
    sources: dict[str, str] = field(default_factory=dict)


def translate(
    config: dict[str, Any],
    *,
    ranks: int,
    run: dict[str, Any] | None = None,
    file: str = "ds_config.json",
    forgiving: bool = False,
) -> Translation:
    """Translates a config; raises UserError for all keys that are unknown, rejected, invalid, or contradict the run.

    `run` holds RUN.yaml's values (nested), which answer "auto". `forgiving` allows contradictions (the command line).
    """
    plan = PartialTranslation(config, ranks, run or {}, file, forgiving)
    keys = dict(_met(plan, config))
    order = {path: place for place, path in enumerate(TABLE)}
    if find(config, "zero_optimization.stage") is ABSENT and not isinstance(config.get("zero_optimization"), bool):
        plan.put_default("zero_optimization.stage", "parallel.zero", 0)
    for path in sorted(keys, key=lambda p: order[_row(p).path]):
        with _collected(plan):
            _account(plan, path, keys[path])
    batch = BatchSizes(None, None, None)
    with _collected(plan):
        batch = put_batch(plan)
    with _collected(plan):
        _defaults(plan)
    different = list({str(error): error for error in plan.refusals}.values())  # keys that go together say the same
    if different:
        raise together(different)
    return Translation(plan.values, tuple(plan.account), batch, plan.sources)


@contextmanager
def _collected(plan: PartialTranslation) -> Iterator[None]:
    """Collects errors, to report all of them at once."""
    try:
        yield
    except UserError as error:
        plan.refusals.append(error)


def read_config(file: Path) -> dict[str, Any]:
    """Reads the JSON file; rejects duplicate keys, as DeepSpeed does."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            twice = next(key for key, _ in items if sum(key == other for other, _ in items) > 1)
            raise UserError(f"{file}: {twice}", None, "given twice", "keep one of the two")
        return result

    field_name = "parallel.deepspeed"
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=pairs)
    except FileNotFoundError:
        near = near_file(file, "*.json")
        remedy = f"did you mean {near}?" if near else "give the path of a DeepSpeed config"
        raise UserError(field_name, str(file), "there is no such file", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})"
        raise UserError(field_name, str(file), problem, "give a JSON file") from None
    except RecursionError:
        raise UserError(field_name, str(file), "is nested too deeply", "give a DeepSpeed config") from None
    except ValueError as error:
        place = f"{file}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(file)
        problem = f"not valid JSON: {getattr(error, 'msg', error)}"
        raise UserError(field_name, place, problem, "check commas, quotes and brackets; JSON has no comments") from None
    if not isinstance(values, dict):
        raise UserError(field_name, str(file), f"holds a {type(values).__name__}", "write a JSON object: { … }")
    return values


def _met(plan: PartialTranslation, values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key of the config that has a row in the table; a block of one row counts as one key."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if (path in TABLE and not (isinstance(value, dict) and _is_section(path))) or f"{path}.*" in TABLE:
            yield path, value
        elif not _is_section(path):
            plan.refusals.append(plan.mistake(path, value, "unknown key", _nearest(path)))
        elif isinstance(value, dict):
            yield from _met(plan, value, f"{path}.")
        elif value is None:
            continue  # `"offload_param": null` is how some leave a block out
        else:
            problem, remedy = "expected a block with settings of its own", f'write "{name}": {{ … }}'
            plan.refusals.append(plan.mistake(path, value, problem, remedy))


def _is_section(path: str) -> bool:
    return any(known.startswith(f"{path}.") and known != f"{path}.*" for known in TABLE)


def _row(path: str) -> Key:
    return TABLE[path] if path in TABLE else TABLE[f"{path}.*"]


def _account(plan: PartialTranslation, path: str, value: Any) -> None:
    key = _row(path)
    if key.verdict == "refused":
        if value == "auto" or value in key.off or _switched_off(value):
            plan.account.append(KeyAccount(path, value, "no effect", "switched off, as it is here"))
        else:
            plan.refusals.append(plan.mistake(path, _brief(value), f"is refused: {key.note}", key.remedy))
        return
    block = path.rpartition(".")[0]
    if block and not path.endswith(".enabled") and find(plan.config, f"{block}.enabled") is False:
        plan.account.append(KeyAccount(path, value, "no effect", f"{block} is switched off"))
        return
    if key.rule is None:
        plan.account.append(KeyAccount(path, value, "no effect", key.note))
        return
    done = key.rule(plan, path, value)
    verdict: Verdict = "no effect" if isinstance(done, NoEffect) else "honoured"
    plan.account.append(KeyAccount(path, value, verdict, str(done), auto=getattr(done, "target", None)))


def _switched_off(value: Any) -> bool:
    """Whether a block requests nothing: `enabled` is false in it, or everywhere below."""
    if not isinstance(value, dict):
        return False
    if "enabled" in value:
        return value["enabled"] in (False, "auto")
    return all(_switched_off(inner) for inner in value.values())


def _brief(value: Any) -> Any:
    return None if isinstance(value, dict) else value


def _nearest(path: str) -> str:
    """Suggestion for an unknown key: the closest in its block, else the same or a similar name elsewhere."""
    block, _, name = path.rpartition(".")
    names = {known.removesuffix(".*") for known in TABLE}
    names |= {parent for known in names for parent in _parents(known)}
    siblings = {known.rpartition(".")[2]: known for known in names if known.rpartition(".")[0] == block}
    anywhere = {known.rpartition(".")[2]: known for known in sorted(names, reverse=True)}
    if name in anywhere:
        return f"did you mean {anywhere[name]}?"
    for known in (siblings, anywhere):
        if near := difflib.get_close_matches(name, list(known), n=1, cutoff=0.6):
            return f"did you mean {known[near[0]]}?"
    return "docs/deepspeed.md has every key; remove this one"


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _defaults(plan: PartialTranslation) -> None:
    """Applies DeepSpeed's defaults for missing keys, unless the run sets them."""
    rules.optimizer_defaults(plan)
    rules.schedule_defaults(plan)
    blocks = [find(plan.config, f"{name}.enabled") for name in ("fp16", "bf16", "bfloat16")]
    if all(value is ABSENT for value in blocks):
        plan.put_default("fp16, bf16", "precision", "fp32")
    if blocks[0] in (True, "auto"):
        plan.put_default("fp16.loss_scale_window", "loss_scale.growth_interval", 1000)
        plan.put_default("fp16.hysteresis", "loss_scale.hysteresis", 2)


def line(entry: KeyAccount, run: dict[str, Any] | None = None) -> tuple[str, str, str]:
    """One entry as three columns: key and value, verdict, action; with the resolved run, also the value of "auto"."""
    key = f"{entry.key}: {show(entry.value)}" if entry.given else f"({entry.key})"
    final = find(run, entry.auto) if run and entry.auto else ABSENT
    known = final is ABSENT or f"{written(entry.auto or '')}: {show(final)} " in entry.done
    answer = "" if known else f" → {show(final)}"
    return key, entry.verdict, entry.done + answer
