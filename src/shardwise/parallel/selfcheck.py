"""Checks the built model before training, in two seconds.

Its logits must equal those of eager attention on one document at a time, and depend neither on
later tokens nor on other packed documents. nn/attention/path_selection.py tries a tiny model of the
class; this is the real one, with its weights, on its device and in its precision. Some
architectures silently ignore `position_ids` or the mask that packing relies on, so tokens are
changed, and logits that must not depend on them are compared. All ranks call it together: the
forwards are collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.config.resolve import purpose_of
from shardwise.core.errors import UserError
from shardwise.data.documents import Documents
from shardwise.data.row_renderers import ROW_PURPOSES
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.attention.varlen import attention_as, install
from shardwise.nn.models.build import evaluating
from shardwise.parallel.zero.stages import ShardedModel
from shardwise.parallel.zero.update import OptimizerStep
from shardwise.resolved_run import ResolvedRun

LENGTH = 24
# Largest change, relative to the largest logit, that counts as rounding. Of 40 tiny models with
# random weights, those that leak changed by 1.1e-3 or more (they hardly mix their tokens), the
# others by 2.5e-7 or less; half precision adds rounding when experts of a mixture change.
TOLERANCE = {torch.float32: 1e-4}
HALF_TOLERANCE = 1e-3
# In half precision, between different shapes; positions that do not restart change logits far more.
ALONE_TOLERANCE = 0.1


class CallsWhole(Protocol):
    """A model that can run full forwards: the run's, or a tiny one where each rank has a part."""

    model: Any

    @property
    def device(self) -> torch.device: ...

    def evaluation(self) -> AbstractContextManager[None]: ...


@dataclass
class UnshardedModel:
    """Gives an unsharded model the interface of ShardedModel that checks use."""

    model: Any

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    def evaluation(self) -> AbstractContextManager[None]:
        """Evaluation mode while the context is open, like ShardedModel's."""
        return evaluating(self.model)


def check_model(
    sharded: CallsWhole,
    vocabulary: int,
    packing: bool,
    label: str,
    device: torch.device,
    documents: bool = False,
) -> None:
    """Refuses a model whose logits depend on later tokens or other documents, or are not eager's.

    `documents`: packed rows come with their documents, as in training (nn/attention/varlen.py).
    """
    model = sharded.model
    length = min(LENGTH, _max_positions(model) // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, 2 * length), generator=generator)
    positions = torch.arange(length).repeat(2)[None] if packing else None
    with sharded.evaluation():
        base = _logits(model, ids, positions, device, documents)
        # Many tokens at once, so that a leak is large. Half of the last document: a model may
        # separate documents and still look ahead within them.
        late = 2 * length - length // 2
        changed = _changed(ids, slice(late, None), vocabulary)
        last = _logits(model, changed, positions, device, documents)
        if _differs(base[:, :late], last[:, :late]):
            problem = "its predictions depend on later tokens, so it is not a causal language model"
            remedy = "use a decoder model (for BERT-like configs: is_decoder: true)"
            raise UserError("model", label, problem, remedy)
        if packing:
            changed = _changed(ids, slice(length), vocabulary)
            first = _logits(model, changed, positions, device, documents)
            if _differs(base[:, length:], first[:, length:]):
                problem = "this model lets packed documents see each other"
                raise UserError("data.packing", True, problem, "set data.packing: false")
        # A model that separates documents may still count positions from the start of the row.
        document = ids[:, length:] if packing else ids
        with attention_as(model, "eager"):
            alone = _logits(model, document, None, device)
        if _mostly_differs(base[:, -document.shape[1] :], alone):
            other = "predicts something else"
            if packing:
                problem = f"this model {other} for a packed document than for the document alone"
                raise UserError("data.packing", True, problem, "set data.packing: false")
            problem = f"{other} than with eager attention, which defines what it computes"
            remedy = "set attn_implementation: eager in its config"
            remedy += ", or use another version of transformers"
            raise UserError("model", label, problem, remedy)


def check_decoder(sharded: CallsWhole, vocabulary: int, label: str, device: torch.device) -> None:
    """Refuses an encoder–decoder model whose decoder looks ahead or ignores the source."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, vocabulary, (1, LENGTH), generator=generator)
    target = torch.randint(0, vocabulary, (1, LENGTH), generator=generator)
    half = LENGTH // 2

    def logits(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = sharded.model(
            input_ids=source.to(device),
            attention_mask=torch.ones_like(source, device=device),
            decoder_input_ids=target.to(device),
            use_cache=False,
        )
        return torch.as_tensor(output.logits)

    with sharded.evaluation():
        base = logits(source, target)
        late = logits(source, _changed(target, slice(half, None), vocabulary))
        if _differs(base[:, :half], late[:, :half]):
            problem = "the predictions of its decoder depend on later tokens of the target"
            raise UserError("model", label, problem, "use another encoder–decoder model")
        if torch.equal(base, logits(_changed(source, slice(LENGTH), vocabulary), target)):
            problem = "what its decoder predicts does not depend on the source"
            raise UserError("model", label, problem, "use another encoder–decoder model")


def without_gradient(sharded: ShardedModel, update: OptimizerStep) -> str:
    """A warning about trained parameters without a gradient after the first backward, or "".

    Some models bypass a layer's forward, where its adapter is (fused state-space kernels do).
    """
    if update.consumes:  # the update frees gradients as soon as they are computed
        return ""
    idle = [name for name, parameter in sharded.parameters.items() if parameter.grad is None]
    if not idle:
        return ""
    count = f"{len(idle)} of {len(sharded.parameters)} trained tensors"
    names = idle[0] if len(idle) == 1 else f"{idle[0]} and others like it"
    return f"{count} had no part in the first step's loss and stay as they are: {names}"


def _logits(
    model: Any,
    ids: torch.Tensor,
    positions: torch.Tensor | None,
    device: torch.device,
    documents: bool = False,
) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": ids.to(device)}
    if positions is not None:
        inputs["position_ids"] = positions.to(device)
        if documents:
            inputs["attention_mask"] = RowsMask(Documents.of_positions(positions).to(device))
    try:
        return torch.as_tensor(model(**inputs, use_cache=False).logits)
    except TypeError as error:
        if positions is not None and "position_ids" in str(error):
            problem = "this model takes no position_ids, so documents cannot be kept apart"
            raise UserError("data.packing", True, problem, "set data.packing: false") from None
        raise


def _max_positions(model: Any) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 1:  # XLNet's is -1
        return limit
    return 2 * LENGTH


def _changed(ids: torch.Tensor, where: slice, vocabulary: int) -> torch.Tensor:
    other = ids.clone()
    other[0, where] = (other[0, where] + vocabulary // 2) % vocabulary
    return other


def _differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(_difference(a, b).max() > TOLERANCE.get(a.dtype, HALF_TOLERANCE))


def _mostly_differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether most tokens differ: in a mixture of experts, rounding may reroute single tokens."""
    return bool(_difference(a, b).median() > TOLERANCE.get(a.dtype, ALONE_TOLERANCE))


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The largest difference of each token's logits, relative to the largest logit."""
    scale = a.float().abs().max().clamp(min=1e-6)
    return (a.float() - b.float()).abs().amax(-1) / scale


def check_documents(
    sharded: CallsWhole,
    vocabulary: int,
    job: ResolvedRun,
    device: torch.device,
    say: Callable[[str], None],
) -> bool:
    """Checks the model; returns whether packed rows bring their documents, or only positions."""
    run = job.run
    label = job.source.label
    purpose = purpose_of(run)
    if purpose in ROW_PURPOSES:  # others may look ahead
        if purpose == "seq2seq":
            check_decoder(sharded, vocabulary, label, device)
        return False
    packing = bool(run.data.packing)
    trouble = ""
    if packing and _takes_documents(job, sharded.model):
        try:
            check_model(sharded, vocabulary, True, label, device, documents=True)
            return True
        # A model's own code may fail on a mask that is no tensor: the plain path decides.
        except Exception as error:
            trouble = str(getattr(error, "problem", error))
    check_model(sharded, vocabulary, packing, label, device)
    if trouble:
        say(f"attention: plain for this model ({trouble})")
    return False


def _takes_documents(job: ResolvedRun, model: Any) -> bool:
    supported = job.source.documents  # by a tiny model, in nn/attention/path_selection.py
    if supported is None:
        return job.run.attention == "auto" and install(model)
    return supported
