"""What a model computes by definition, and which faster paths compute the same.

[Note: definition] The definition of a model is its own code with eager attention, one document at a time, without
padding. Everything else (SDPA and the kernels behind it, packed or padded rows, masks that are no tensors) is a
shortcut, and some shortcuts of some architectures are silently wrong: transformers 5.17 drops Gemma 2's attention
softcap in SDPA; recurrent layers carry their state from one packed document into the next. So each shortcut is tried on
a tiny model of the class (nn/tiny/case.py) against the definition, loss and every gradient in double precision, and
used only if it computes the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from shardwise.config.objectives import Task
from shardwise.core.cache import cache_root
from shardwise.core.compat.hf_private import attention_of
from shardwise.core.labels import IGNORE
from shardwise.data.documents import Documents
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.attention.varlen import register, set_attention
from shardwise.nn.models.build import find_blocks
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.case import (
    DoubleSoftmax,
    LossAndGradients,
    TinyCase,
    gradients_of,
    judge,
    mean_loss,
    summed,
    tiny_case,
    units_of,
)

LENGTHS = ((5, 11), (16,), (7, 4, 5), (9, 7))  # of the documents in each packed row
PADDING = (0, 4, 0, 7)  # at the end of each padded row
OF_TARGETS = (5, 0, 3, 0)  # the same where rows have a source and a target

FORMAT = 3  # of cached outcomes

Rows = Literal["packed", "padded", "single"]  # several documents a row; one, filled up to the longest; a row at a time


@dataclass(frozen=True)
class AttentionPath:
    """transformers' name for the attention, and whether packed rows bring their documents (document_mask.py).

    `slower`: what prevents SDPA. `trouble`: what is wrong with every path. `untried`: why no tiny model of the class
    could be tried; the name is then empty, and transformers' own choice stands.
    """

    implementation: str
    documents: bool
    slower: str = ""
    trouble: str = ""
    untried: str = ""
    bypassed: str = ""


@dataclass(frozen=True)
class _Table:
    """The rows of a case: the model's inputs, and the labels."""

    case: TinyCase
    rows: Rows

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self.case.inputs()

    @property
    def real(self) -> torch.Tensor:
        """1 for tokens, 0 for padding."""
        ids = self.inputs["input_ids"]
        sizes = ids.shape[1] - torch.tensor(PADDING)
        return (torch.arange(ids.shape[1]) < sizes[:, None]).long()

    @property
    def labels(self) -> torch.Tensor:
        labels = self.case.labels()
        if self.rows == "packed":
            return labels
        sizes = labels.shape[1] - torch.tensor(OF_TARGETS if self._two else PADDING)
        return labels.masked_fill(torch.arange(labels.shape[1]) >= sizes[:, None], IGNORE)

    @property
    def _two(self) -> bool:
        """Whether rows have a source and a target."""
        return self.case.task == "seq2seq"

    def documents(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yields inputs and labels of one document after the other, without padding."""
        for number, places in enumerate(self._places()):
            for start, end in places:
                row = {name: table[number : number + 1] for name, table in self.inputs.items()}
                labels = self.labels[number : number + 1]
                row["input_ids"] = row["input_ids"][:, start:end]
                if self._two:
                    size = labels.shape[1] - OF_TARGETS[number]
                    row["decoder_input_ids"] = row["decoder_input_ids"][:, :size]
                    yield row, labels[:, :size]
                else:
                    yield row, labels[:, start:end]

    def _places(self) -> Iterator[list[tuple[int, int]]]:
        width = self.inputs["input_ids"].shape[1]
        if self.rows != "packed":
            yield from ([(0, width - missing)] for missing in PADDING)
            return
        for lengths in LENGTHS:
            ends = torch.tensor(lengths).cumsum(0).tolist()
            yield list(zip([0, *ends], ends, strict=False))


def by_definition(case: TinyCase, rows: Rows) -> LossAndGradients:
    """Returns loss and gradients by [Note: definition]."""
    table = _Table(case, rows)
    with DoubleSoftmax():
        return summed(case.model(attention="eager"), table.documents(), units_of(table.labels))


def by_path(case: TinyCase, rows: Rows, path: AttentionPath) -> LossAndGradients:
    """Returns loss and gradients as a run computes them on a path: all rows at once, except for single ones."""
    model = case.model(attention=path.implementation)
    table = _Table(case, rows)
    if rows == "single":
        return summed(model, table.documents(), units_of(table.labels))
    inputs: dict[str, Any] = dict(table.inputs)
    if rows == "packed":
        documents = Documents.of_lengths(LENGTHS)
        inputs["position_ids"] = documents.positions
        if path.documents:
            inputs["attention_mask"] = RowsMask(documents)
    else:
        inputs["attention_mask"] = table.real
    labels = table.labels
    loss = mean_loss(model(**inputs, use_cache=False).logits, labels, units_of(labels))
    loss.backward()
    return LossAndGradients(loss.item(), gradients_of(model))


def path_for(source: ModelSource, rows: Rows, documents: bool = True) -> AttentionPath:
    """Returns the fastest path that computes such rows by [Note: definition]; one with a `trouble` if none does.

    `documents`: whether packed rows may bring their documents. Outcomes are cached by config and versions.
    """
    case = tiny_case(source)
    file = cache_root() / "attention" / f"{_key(case, rows, documents)}.json"
    if file.is_file():
        return AttentionPath(**json.loads(file.read_text()))
    with torch.random.fork_rng(devices=[]):
        path = _try_paths(case, rows, documents)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(path)))
    part.rename(file)
    return path


def set_path(model: Any, task: Task) -> None:
    """Sets the attention of a model loaded for inference, as `path_for` finds it for rows with padding."""
    register()
    if attention_of(model.config) in ("sdpa", "eager"):
        path = path_for(ModelSource("", model.config, None, "", task=task), "padded")
        if path.implementation:
            set_attention(model, path.implementation)


def _try_paths(case: TinyCase, rows: Rows, documents: bool) -> AttentionPath:
    path = _try_in(case, rows, documents)
    if not path.untried and "nan" in path.trouble:
        # Masks of some classes (ProphetNet, Longformer) add up to infinity in double precision.
        path = _try_in(replace(case, dtype=torch.float32), rows, documents)
    return path


def _try_in(case: TinyCase, rows: Rows, documents: bool) -> AttentionPath:
    try:
        expected = by_definition(case, rows)
    except Exception as error:  # the model's own code: a class whose tiny model needs more than tokens
        return AttentionPath("", documents and rows == "packed", untried=_line(error))
    choices = [True, False] if documents and rows == "packed" else [False]
    paths = [AttentionPath(name, with_documents) for with_documents in choices for name in ("sdpa", "eager")]
    troubles: list[str] = []
    for path in paths:
        try:
            verdict = judge(by_path(case, rows, path), expected)
        except Exception as error:
            troubles.append(_line(error))
            continue
        if verdict.right:
            slower = troubles[0] if path.implementation == "eager" else ""
            return replace(path, slower=slower, bypassed=bypassed_block(case))
        troubles.append(f"loss {verdict.loss:.0e} apart, gradient of {verdict.module} {verdict.gradient:.0e}")
    return replace(paths[0], trouble=next((text for text in troubles if "nan" in text), troubles[0]))


def bypassed_block(case: TinyCase) -> str:
    """The first block whose `forward` is called directly instead of the block; empty where there is none.

    Sharding gathers parameters in hooks of the block, which such a call does not run.
    """
    model = case.model()
    hooked: set[str] = set()
    entered: set[str] = set()
    for name, block in find_blocks(model):
        block.register_forward_pre_hook(lambda *_, name=name: hooked.add(name))
        block.forward = _noting(block.forward, name, entered)
    with torch.no_grad():
        model(**case.inputs(rows=1), use_cache=False)
    return min(entered - hooked, default="")


def _noting(forward: Any, name: str, entered: set[str]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        entered.add(name)
        return forward(*args, **kwargs)

    return noted


def _key(case: TinyCase, rows: Rows, documents: bool) -> str:
    """What an outcome depends on: the model's code and config, and the versions of the libraries."""
    import transformers

    import shardwise

    config = case.config
    parts = [FORMAT, type(config).__module__, config.to_json_string(), case.task, rows, documents]
    parts += [torch.__version__, transformers.__version__, shardwise.__version__]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:160]
