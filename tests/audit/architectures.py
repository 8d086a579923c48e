"""Every architecture of the installed transformers through the code that trains, against the model's own definition.

    PYTHONPATH=src:tests python -m audit.architectures [--task causal] [--json FILE] [MODEL_TYPE…]

A tiny model of each class is written as a folder, trained for two steps by the run's own code (prepare_run,
build_state, accumulate) and compared with foresight/verify/plain.py: eager attention, one document at a time, in fp32.
Rows are laid out as a user gets them (`data.packing: auto`), and one document a row. Outcomes:

equal     loss, gradients and update, up to rounding
refused   a message before the run starts
fails     an error that is no message
differs   anything else: there must be none
unbuilt   no tiny model of the class computes a loss from tokens alone
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TASKS = ("causal", "masked", "seq2seq")
# In fp32, with weights that make much of rounding: norms 1.4e-5 apart were measured; what is wrong is off by 1e-3.
BOUNDS = {"loss": 1e-4, "norm": 1e-4, "gradient": 1e-3, "update": 1e-2, "after": 5e-4}
LIMIT = 240.0  # seconds for one architecture
ROWS = 4
WORDS = 520  # what the tokenizer has, and some
# Classes whose plain config leaves out a kind of layer that their released models have.
ASKS = "output_router_logits"  # of a config: the loss of its routers belongs to the model's own
VARIANTS: dict[str, dict[str, Any]] = {"lfm2": {"layer_types": ["conv", "full_attention"] * 16}}


class Undefined(Exception):
    """The model's own code computes no loss of its own."""


@dataclass
class Found:
    """What became of an architecture with one layout of rows."""

    model_type: str
    task: str
    packing: str
    outcome: str
    why: str = ""
    packed: bool = False
    notes: list[str] = field(default_factory=list)  # the slower paths that were taken
    loss: float | None = None
    gradient: float | None = None
    seconds: float = 0.0


def audit(tasks: tuple[str, ...], names: list[str], shared: Path, part: str = "1/1") -> Iterator[Found]:
    """One architecture after the other, each in a process of its own; `part` "1/4": the first of every four."""
    from shardwise.foresight.zoo.run import architectures
    from shardwise.train.trial.ranks import run_ranks

    first, step = map(int, part.split("/"))
    for task in tasks:
        chosen = [n for n in architectures(task) if not names or n in names]  # type: ignore[arg-type]
        for name in chosen[first - 1 :: step]:
            for packing in ("auto", "false") if task == "causal" else ("auto",):
                began = time.monotonic()
                (found,) = run_ranks(lambda _, folder, n=name, t=task, p=packing: _try(n, t, p, shared), 1, LIMIT)
                found = found or asdict(Found(name, task, packing, "unbuilt", "no answer"))
                yield Found(**found | {"seconds": round(time.monotonic() - began, 1)})


def _try(model_type: str, task: str, packing: str, shared: Path) -> dict[str, Any]:
    """In a process of its own: the outcome, as JSON.

    What differs is tried with other weights too: where a ReLU's input is zero but for rounding (as one of CTRL's is),
    gradients are apart by a token's share, and with other weights they are not.
    """
    found = _try_weights(model_type, task, packing, shared, seed=0)
    again = _try_weights(model_type, task, packing, shared, seed=1) if found["outcome"] == "differs" else found
    return again


def _try_weights(model_type: str, task: str, packing: str, shared: Path, seed: int) -> dict[str, Any]:
    from shardwise.core.errors import UserError

    found = Found(model_type, task, packing, "unbuilt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _write_model(model_type, task, folder / "model", shared, seed)
        except BaseException as error:
            found.why = _line(error)
            return asdict(found)
        run = _run(task, packing, folder, shared)
        try:
            _compare(run, task, folder, found)
        except UserError as error:
            found.outcome, found.why = "refused", f"{error.field}: {error.problem}"
        except Undefined as error:
            found.why = f"the reference fails: {error}"
        except BaseException as error:
            found.outcome, found.why = "fails", _line(error)
    return asdict(found)


def _write_model(model_type: str, task: str, folder: Path, shared: Path, seed: int = 0) -> None:
    """A tiny model whose weights are far from where training starts, which computes a loss; with a tokenizer."""
    import torch
    from transformers import CONFIG_MAPPING

    from shardwise.foresight.verify.shrunk_model import still
    from shardwise.nn.tiny.case import TinyCase
    from shardwise.nn.tiny.shrink import shrink

    config = shrink(CONFIG_MAPPING[model_type](**VARIANTS.get(model_type, {})))
    _set_vocabulary(config)
    case = TinyCase(still(config), task, seed, torch.float32)  # type: ignore[arg-type]
    model = case.model(attention="eager")
    for module in model.modules():  # as trained models have it, and as some classes make it when they are loaded
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0
    inputs = case.inputs(rows=1)
    model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), use_cache=False).logits.sum().backward()
    if hasattr(case.config, ASKS) and task == "causal":
        setattr(model.config, ASKS, _adds_router_loss(model, inputs))
    model.save_pretrained(folder)
    for file in (shared / "tokenizer").iterdir():
        shutil.copy(file, folder)


def _set_vocabulary(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if "vocab_size" in name and isinstance(value, int):
            setattr(config, name, WORDS)
    for name in getattr(type(config), "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            _set_vocabulary(getattr(config, name))


def _adds_router_loss(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the model's own code computes a router loss when asked; that of some classes fails."""
    try:
        return model(**inputs, labels=inputs["input_ids"], use_cache=False, **{ASKS: True}).loss is not None
    except Exception:
        return False


def _run(task: str, packing: str, folder: Path, shared: Path) -> dict[str, Any]:
    rows = shared / ("pairs.jsonl" if task == "seq2seq" else "texts.jsonl")
    return {
        "model": str(folder / "model"), "objective": task, "output": str(folder / "out"), "device": "cpu", "ranks": 1,
        "precision": "fp32", "resume": "never",
        "data": {"train": str(rows), "sequence_length": 64, "over_length": "drop", "workers": 1,
                 "packing": {"auto": "auto", "false": False}[packing]},
        "train": {"steps": 2, "batch_size": ROWS, "micro_batch_size": ROWS, "learning_rate": 1e-3, "warmup": 0},
    }  # fmt: skip


def _compare(run: dict[str, Any], task: str, folder: Path, found: Found) -> None:
    import torch

    from shardwise.config.load import load_run
    from shardwise.foresight.prepare import prepare_run
    from shardwise.foresight.verify import measure, plain
    from shardwise.foresight.verify.compare import Bounds
    from shardwise.foresight.verify.prove import _documents, _routers, _trained
    from shardwise.nn.models.tasks import CLASSES

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    job = prepare_run(load_run(run), lambda text: found.notes.append(text) if "attention" in text else None)
    found.packed = bool(job.run.data.packing)
    found.notes += [why for path, why in job.reasons.items() if path in ("data.packing", "train.micro_batch_size")]
    torch.save(_documents(job, ROWS), folder / "documents.pt")
    train = job.run.train
    work = {
        "model": str(folder / "model"), "auto_class": CLASSES[job.source.task][0], "trust_remote_code": False,
        "task": task, "device": "cpu", "precision": "fp32", "documents": str(folder / "documents.pt"),
        "answer": str(folder / "answer.safetensors"), "trained": _trained(job), "adapter": None, "scales": {},
        "learning_rate": train.learning_rate, "betas": train.betas, "eps": train.eps, "clip": train.max_grad_norm,
        "weight_decay": train.weight_decay, "decay_norms": train.decay_norms, "steps_like_ours": True,
        "routers": _routers({}, job),
    }  # fmt: skip
    try:
        plain.answer(work)
    except Exception as error:
        raise Undefined(_line(error)) from error
    answer = measure.measure({
        "run": job.run.model_dump(mode="json"), "against": str(folder / "answer.safetensors"),
        "bounds": BOUNDS,
    })  # fmt: skip
    from shardwise.foresight.verify.compare import ParityDifference

    difference = ParityDifference(**answer["difference"])
    found.loss, found.gradient = difference.loss, difference.gradient
    trouble = difference.trouble(Bounds(**BOUNDS))
    found.outcome, found.why = ("differs", trouble) if trouble else ("equal", "")


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def prepare(shared: Path) -> None:
    """A tokenizer and rows that all architectures share."""
    from support.tiny import PAIRS, tokenizer_folder

    tokenizer_folder(shared / "tokenizer")
    pairs = [json.loads(line)["messages"] for line in PAIRS.read_text().splitlines()][:40]
    words = [[m["content"].split() for m in pair[-2:]] for pair in pairs]
    texts = [{"text": " ".join(answer[: 3 + number % 9])} for number, (_, answer) in enumerate(words)]
    both = [{"source": " ".join(q[:6]), "target": " ".join(a[: 3 + n % 6])} for n, (q, a) in enumerate(words)]
    for name, rows in (("texts", texts), ("pairs", both)):
        (shared / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def summary(results: list[Found]) -> str:
    """Counts by task and layout."""
    counts = Counter((one.task, one.packing, one.outcome) for one in results)
    kinds = sorted({(one.task, one.packing) for one in results})
    lines = []
    for task, packing in kinds:
        told = ", ".join(f"{counts[task, packing, o]} {o}" for o in ("equal", "refused", "fails", "differs", "unbuilt"))
        packed = sum(one.packed for one in results if (one.task, one.packing, one.outcome) == (task, packing, "equal"))
        lines.append(f"{task}, packing {packing}: {told}" + (f" ({packed} of the equal ones packed)" if packed else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--task", action="append", choices=TASKS, help="the default: all")
    parser.add_argument("--json", type=Path, help="a file for all results")
    parser.add_argument("--part", default="1/1", help="2/4: the second of every four, to share the work")
    options = parser.parse_args()
    os.environ.setdefault("SHARDWISE_PROGRESS", "off")
    results: list[Found] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["SHARDWISE_CACHE"] = str(Path(name) / "cache")
        prepare(Path(name))
        import shardwise.foresight.verify.measure
        import shardwise.foresight.verify.plain  # noqa: F401  (imported once, before processes part)

        for one in audit(tuple(options.task or TASKS), options.names, Path(name), options.part):
            results.append(one)
            apart = "" if one.loss is None else f" loss {one.loss:.1e}, gradients {one.gradient or 0:.1e}"
            print(
                f"{one.task} {one.model_type} packing={one.packing}: {one.outcome}{apart} {one.why}".rstrip(),
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    print(summary(results))
    return int(any(one.outcome in ("differs", "fails") for one in results))


if __name__ == "__main__":
    sys.exit(main())
