"""Two seconds of proof before training: this model, as built, computes what it does with eager attention and one
document at a time, and neither looks ahead nor across packed documents.

nn/attention/definition.py has tried a tiny model of the class; this is the real one, with its weights, on its device
and in its precision. Some architectures ignore `position_ids` or the mask that packing relies on, and say nothing:
tokens are changed to see whether logits move that must not. All ranks run it together (the forwards are collective).
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
from shardwise.parallel.zero.update import Update
from shardwise.resolved_run import ResolvedRun

LENGTH = 24
# Largest movement, as a share of the largest logit, that passes for rounding. Of 40 tiny fresh models those that leak
# moved by 1.1e-3 or more (a fresh model hardly mixes its tokens), the others by 2.5e-7 or less; half precision has
# rounding of its own where the changed tokens of a mixture of experts go another way.
TOLERANCE = {torch.float32: 1e-4}
HALF_TOLERANCE = 1e-3
ALONE_TOLERANCE = 0.1  # in half precision: other shapes, other rounding; positions that do not restart move far more


class CallsWhole(Protocol):
    """A model to ask: the run's own, or where none of its ranks has all of it, a tiny one of its class."""

    model: Any

    @property
    def device(self) -> torch.device: ...

    def evaluation(self) -> AbstractContextManager[None]: ...


@dataclass
class UnshardedModel:
    """A model that is not sharded, where training's parts expect one that is."""

    model: Any

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    def evaluation(self) -> AbstractContextManager[None]:
        """As of ShardedModel."""
        return evaluating(self.model)


def check_model(
    sharded: CallsWhole,
    vocabulary: int,
    packing: bool,
    label: str,
    device: torch.device,
    documents: bool = False,
) -> None:
    """Refuses a model whose logits depend on later tokens or on another document of the same sequence, or are not
    those of eager attention.

    `documents`: packed rows bring their documents, as the objective will have it (nn/attention/varlen.py).
    """
    length = min(LENGTH, _positions(sharded.model) // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, 2 * length), generator=generator)
    positions = torch.arange(length).repeat(2)[None] if packing else None
    with sharded.evaluation():
        base = _logits(sharded.model, ids, positions, device, documents)
        # Many tokens at once: the more that leaks, the surer it shows. Half of the last document, for a model may keep
        # documents apart and still look ahead within them.
        late = 2 * length - length // 2
        last = _logits(
            sharded.model,
            _changed(ids, slice(late, None), vocabulary),
            positions,
            device,
            documents,
        )
        if _moved(base[:, :late], last[:, :late]):
            problem = "its predictions depend on later tokens, so it is not a causal language model"
            remedy = "use a decoder model (for BERT-like configs: is_decoder: true)"
            raise UserError("model", label, problem, remedy)
        if packing:
            first = _logits(
                sharded.model,
                _changed(ids, slice(length), vocabulary),
                positions,
                device,
                documents,
            )
            if _moved(base[:, length:], first[:, length:]):
                problem = "this model lets packed documents see each other"
                raise UserError("data.packing", True, problem, "set data.packing: false")
        # Kept apart, a model may still count positions from the start of the row.
        one = ids[:, length:] if packing else ids
        with attention_as(sharded.model, "eager"):
            alone = _logits(sharded.model, one, None, device)
        if _mostly_moved(base[:, -one.shape[1] :], alone):
            if packing:
                problem = "this model predicts something else for a packed document than for the document alone"
                raise UserError("data.packing", True, problem, "set data.packing: false")
            problem = (
                "predicts something else than with eager attention, which defines what it computes"
            )
            remedy = "set attn_implementation: eager in its config, or use another version of transformers"
            raise UserError("model", label, problem, remedy)


def check_decoder(sharded: CallsWhole, vocabulary: int, label: str, device: torch.device) -> None:
    """Refuses an encoder–decoder model whose decoder looks ahead, or does not look at the source."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(0, vocabulary, (1, LENGTH), generator=generator) for _ in range(2)
    )
    half = LENGTH // 2

    def logits(read: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        inputs = {
            "input_ids": read,
            "attention_mask": torch.ones_like(read),
            "decoder_input_ids": given,
        }
        model: Any = sharded.model
        return torch.as_tensor(
            model(**{k: v.to(device) for k, v in inputs.items()}, use_cache=False).logits
        )

    with sharded.evaluation():
        base = logits(source, target)
        late = logits(source, _changed(target, slice(half, None), vocabulary))
        if _moved(base[:, :half], late[:, :half]):
            problem = "the predictions of its decoder depend on later tokens of the target"
            raise UserError("model", label, problem, "use another encoder–decoder model")
        if torch.equal(base, logits(_changed(source, slice(LENGTH), vocabulary), target)):
            problem = "what its decoder predicts does not depend on the source"
            raise UserError("model", label, problem, "use another encoder–decoder model")


def without_gradient(sharded: ShardedModel, update: Update) -> str:
    """After a first backward: which parameters are to be trained but had no part in the loss; empty if none.

    Some models read a layer's weight past its forward, where an adapter lives (fused state-space kernels do).
    """
    if update.consumes:  # gradients are gone as soon as they are known
        return ""
    idle = [name for name, parameter in sharded.parameters.items() if parameter.grad is None]
    if not idle:
        return ""
    most = f"{len(idle)} of {len(sharded.parameters)} trained tensors had no part in the first step's loss"
    return f"{most} and stay as they are: {idle[0]}{' and others like it' if len(idle) > 1 else ''}"


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


def _positions(model: Any) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 1 else 2 * LENGTH  # XLNet's is -1


def _changed(ids: torch.Tensor, where: slice, vocabulary: int) -> torch.Tensor:
    other = ids.clone()
    other[0, where] = (other[0, where] + vocabulary // 2) % vocabulary
    return other


def _moved(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(_movement(a, b).max() > TOLERANCE.get(a.dtype, HALF_TOLERANCE))


def _mostly_moved(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Most tokens, not one: in a mixture of experts rounding sends a token now and then to another expert."""
    return bool(_movement(a, b).median() > TOLERANCE.get(a.dtype, ALONE_TOLERANCE))


def _movement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far each token's logits moved, as a share of the largest logit."""
    scale = a.float().abs().max().clamp(min=1e-6)
    return (a.float() - b.float()).abs().amax(-1) / scale


def check_documents(
    sharded: CallsWhole,
    vocabulary: int,
    job: ResolvedRun,
    device: torch.device,
    say: Callable[[str], None],
) -> bool:
    """Checks the model; returns whether packed rows bring their documents, or positions alone."""
    run, trouble = job.run, ""
    if (purpose := purpose_of(run)) in ROW_PURPOSES:  # others may look ahead as they like
        if purpose == "seq2seq":
            check_decoder(sharded, vocabulary, job.source.label, device)
        return False
    packing, known = (
        bool(run.data.packing),
        job.source.documents,
    )  # as nn/attention/definition.py found on a tiny model
    if packing and (run.attention == "auto" and install(sharded.model) if known is None else known):
        try:
            check_model(sharded, vocabulary, True, job.source.label, device, documents=True)
            return True
        except Exception as error:  # a model's own code may choke on a mask that is no tensor: the plain path decides
            trouble = str(getattr(error, "problem", error))
    check_model(sharded, vocabulary, packing, job.source.label, device)
    if trouble:
        say(f"attention: plain for this model ({trouble})")
    return False
