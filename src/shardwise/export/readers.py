"""Who can read a GGUF file: transformers as its users call it, and llama.cpp by its rules, or itself where it is there.

Each reader gives a verdict with its reason. A reader that reads the file faithfully gives, within what rounding to the
file's type explains, the parameters and the logits of the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardwise.export.check import BOUNDS, compare, compare_logits
from shardwise.nn.models.gguf import alike, load_gguf, unread_tensors
from shardwise.nn.models.gguf_rules import GgufFile, layer_of, meaning, open_gguf, refusal
from shardwise.nn.models.source import first_line
from shardwise.nn.models.tasks import auto_class, task_of

# Keys of configs that change no logits, or that no file has.
NO_MATTER = ("_", "transformers_version", "dtype", "architectures", "use_cache", "bos_", "eos_", "pad_", "unk_", "id2",
             "label2", "tie_word", "max_position", "vocab_size", "n_ctx", "model_type", "task_specific")  # fmt: skip
UNUSABLE = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError)
OWN_ROUNDING = 0.05  # llama.cpp rounds activations and its cache, and has tables for some functions


@dataclass(frozen=True)
class ReaderVerdict:
    """Whether a reader reads a file as the model that was trained, and why or why not."""

    reader: str
    reads: bool
    why: str
    wrong: bool = False  # the file itself says something else than the model: no reader can make it right

    @property
    def line(self) -> str:
        """For the terminal and the card."""
        return f"{self.reader}: {'yes' if self.reads else 'no'}, {self.why}"


def judge(
    reference: Any, file: Path, ids: Sequence[torch.Tensor], kind: str, problem: str | None
) -> list[ReaderVerdict]:
    """The verdicts on a file; `problem`: what llama.cpp has built in other than the model needs it, if known."""
    facts = open_gguf(file)
    as_llama, same = _by_rules(reference, file, facts, ids, kind, problem)
    plain = as_llama if same else _by_transformers(reference, file, facts, ids, kind)
    itself = None if as_llama.wrong else _by_llama_cpp(reference, file, ids, kind)
    return [itself or as_llama, ReaderVerdict("transformers (gguf_file=)", plain.reads, plain.why)]


def _by_rules(
    reference: Any, file: Path, facts: GgufFile, ids: Sequence[torch.Tensor], kind: str, problem: str | None
) -> tuple[ReaderVerdict, bool]:
    """llama.cpp's rules, and the logits that follow from how it understands the settings.

    Also says whether transformers understands them the same way, so that its verdict is the same.
    """
    reader = "llama.cpp (by its rules)"
    if (why := refusal(facts) or problem) is not None:
        return ReaderVerdict(reader, False, why), False
    try:
        model, differing = load_gguf(file, auto_class(task_of(reference.config)), meaning(facts))
        outcome = compare(reference, model, ids, kind)
    except UNUSABLE as error:
        return ReaderVerdict(
            reader, False, f"with its settings nothing can be computed ({first_line(error)})", True
        ), False
    if outcome.problem is not None:
        return ReaderVerdict(reader, False, outcome.problem, wrong=True), not differing
    return ReaderVerdict(reader, True, f"it reads all {len(facts.shapes)} tensors; {outcome.figures}"), not differing


def _by_transformers(
    reference: Any, file: Path, facts: GgufFile, ids: Sequence[torch.Tensor], kind: str
) -> ReaderVerdict:
    reader = "transformers"
    try:
        model, _ = load_gguf(file, auto_class(task_of(reference.config)))
        outcome = compare(reference, model, ids, kind)
    except UNUSABLE as error:
        return ReaderVerdict(reader, False, f"it cannot compute with it ({first_line(error)})")
    if outcome.problem is None:
        return ReaderVerdict(reader, True, outcome.figures)
    reasons = _unread(model, facts) + _misread(model.config, reference.config)
    figure = f"logits differ by {outcome.relative:.2%} of their spread on {outcome.tokens} tokens"
    return ReaderVerdict(reader, False, "; ".join([*(reasons or [outcome.problem]), figure]))


def _unread(model: Any, facts: GgufFile) -> list[str]:
    lost = unread_tensors(model, facts)
    kinds = list(dict.fromkeys(layer_of(name) for name in lost))
    some = f"{', '.join(kinds[:3])}{', …' * (len(kinds) > 3)}"
    return [f"it ignores {len(lost)} tensor{'s' * (len(lost) > 1)} ({some})"] if lost else []


def _misread(got: Any, wanted: Any) -> list[str]:
    """Settings that transformers finds otherwise than the model has them."""
    ours, theirs = wanted.to_dict(), got.to_dict()
    keys = [k for k in ours if k in theirs and not alike(ours[k], theirs[k]) and not k.startswith(NO_MATTER)]
    return [_difference(key, theirs[key], ours[key]) for key in keys[:2]]


def _difference(key: str, got: Any, wanted: Any) -> str:
    while isinstance(got, dict) and isinstance(wanted, dict):
        first = next(one for one in wanted if not alike(got.get(one), wanted[one]))
        key, got, wanted = f"{key}.{first}", got.get(first), wanted[first]
    return f"it reads {key} as {str(got)[:40]} instead of {str(wanted)[:40]}"


def _by_llama_cpp(reference: Any, file: Path, ids: Sequence[torch.Tensor], kind: str) -> ReaderVerdict | None:
    """llama.cpp's own logits, where PyPI's llama-cpp-python is installed; None where it is not."""
    if find_spec("llama_cpp") is None or reference.config.is_encoder_decoder:
        return None
    llama_cpp: Any = import_module("llama_cpp")
    reader = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
    longest = max(one.shape[-1] for one in ids)
    try:
        model = llama_cpp.Llama(
            str(file), n_ctx=longest + 8, n_batch=longest + 8, logits_all=True, verbose=False, n_gpu_layers=0
        )
    except ValueError as error:
        return ReaderVerdict(reader, False, f"it does not load it ({first_line(error)})")
    outcome = compare_logits(reference, _asked(model), ids, kind)
    bound = max(BOUNDS[kind].logits, OWN_ROUNDING)
    figures = f"its logits differ by {outcome.relative:.2%} of their spread (bound {bound:.0%})"
    return ReaderVerdict(reader, outcome.relative <= bound, f"{figures}; same first choice {outcome.same_top:.1%}")


def _asked(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def row(ids: list[int]) -> torch.Tensor:
        model.reset()
        model.eval(ids)
        return torch.tensor(model.scores[: len(ids)])

    return lambda ids: torch.stack([row(one) for one in ids.tolist()])
