"""Tests who can read a GGUF file: transformers as its users call it, and llama.cpp by its rules, or itself if
installed.

Each reader gets a verdict with its reason. A reader that reads the file faithfully reproduces, within what rounding to
the file's dtype explains, the parameters and the logits of the trained model.
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
        """One line for the terminal and the card."""
        return f"{self.reader}: {'yes' if self.reads else 'no'}, {self.why}"


def judge(
    reference: Any, file: Path, ids: Sequence[torch.Tensor], kind: str, problem: str | None
) -> list[ReaderVerdict]:
    """Returns the verdicts on a file; `problem` is what llama.cpp has built in differently from the model, if known."""
    facts = open_gguf(file)
    by_rules, same_reading = _by_rules(reference, file, facts, ids, kind, problem)
    by_transformers = by_rules if same_reading else _by_transformers(reference, file, facts, ids, kind)
    by_llama_cpp = None if by_rules.wrong else _by_llama_cpp(reference, file, ids, kind)
    return [
        by_llama_cpp or by_rules,
        ReaderVerdict("transformers (gguf_file=)", by_transformers.reads, by_transformers.why),
    ]


def _by_rules(
    reference: Any, file: Path, facts: GgufFile, ids: Sequence[torch.Tensor], kind: str, problem: str | None
) -> tuple[ReaderVerdict, bool]:
    """llama.cpp's rules, and the logits that follow from how it interprets the settings.

    Also says whether transformers interprets them the same way, so that its verdict is the same.
    """
    reader = "llama.cpp (by its rules)"
    if (reason := refusal(facts) or problem) is not None:
        return ReaderVerdict(reader, False, reason), False
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
    ignored = unread_tensors(model, facts)
    kinds = list(dict.fromkeys(layer_of(name) for name in ignored))
    examples = f"{', '.join(kinds[:3])}{', …' * (len(kinds) > 3)}"
    return [f"it ignores {len(ignored)} tensor{'s' * (len(ignored) > 1)} ({examples})"] if ignored else []


def _misread(read: Any, expected: Any) -> list[str]:
    """Settings that transformers reads differently from the model's."""
    expected_values = expected.to_dict()
    read_values = read.to_dict()
    keys = [
        k
        for k in expected_values
        if k in read_values and not alike(expected_values[k], read_values[k]) and not k.startswith(NO_MATTER)
    ]
    return [_difference(key, read_values[key], expected_values[key]) for key in keys[:2]]


def _difference(key: str, read: Any, expected: Any) -> str:
    while isinstance(read, dict) and isinstance(expected, dict):
        first = next(name for name in expected if not alike(read.get(name), expected[name]))
        key = f"{key}.{first}"
        read = read.get(first)
        expected = expected[first]
    return f"it reads {key} as {str(read)[:40]} instead of {str(expected)[:40]}"


def _by_llama_cpp(reference: Any, file: Path, ids: Sequence[torch.Tensor], kind: str) -> ReaderVerdict | None:
    """llama.cpp's own logits, if PyPI's llama-cpp-python is installed; None if not."""
    if find_spec("llama_cpp") is None or reference.config.is_encoder_decoder:
        return None
    llama_cpp: Any = import_module("llama_cpp")
    reader = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
    longest = max(sequence.shape[-1] for sequence in ids)
    try:
        model = llama_cpp.Llama(
            str(file), n_ctx=longest + 8, n_batch=longest + 8, logits_all=True, verbose=False, n_gpu_layers=0
        )
    except ValueError as error:
        return ReaderVerdict(reader, False, f"it does not load it ({first_line(error)})")
    outcome = compare_logits(reference, _logits_of(model), ids, kind)
    bound = max(BOUNDS[kind].logits, OWN_ROUNDING)
    figures = f"its logits differ by {outcome.relative:.2%} of their spread (bound {bound:.0%})"
    return ReaderVerdict(reader, outcome.relative <= bound, f"{figures}; same first choice {outcome.same_top:.1%}")


def _logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def row(ids: list[int]) -> torch.Tensor:
        model.reset()
        model.eval(ids)
        return torch.tensor(model.scores[: len(ids)])

    return lambda ids: torch.stack([row(sequence) for sequence in ids.tolist()])
