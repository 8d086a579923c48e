"""Attention within documents of packed rows: no padding, no mask tensor, no device synchronisation.

transformers has two registries for masks and attention functions. `install` registers functions under the names that
models already use (a new name changes their code paths), which act on batches that carry their documents (see
documents.py) and pass every other call to the functions registered before. On CUDA all documents of a batch go through
one variable-length kernel; on a CPU they are computed one by one. What these cannot do (position biases, dropout or
fp32 in the kernel, modules with attention of their own) gets the right mask as a tensor.

[Note: softcaps and sinks] transformers' SDPA function takes any keyword and ignores those that it does not know, the
softcap of Gemma 2 and the sinks of gpt-oss among them. Ours computes them: by a kernel of its own on CUDA
(nn/attention/softcap.py), else as its reference does. Which models are right under the name `sdpa` is tested
(definition.py).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from shardwise.core.compat.hf_private import attention_of, is_config, set_attention_of
from shardwise.core.effective_device import effective_device, stands_in
from shardwise.nn.attention.document_mask import DocumentMask, OwnMask, OwnRows, RowsMask
from shardwise.nn.attention.length_groups import attend_in_groups, groups_of
from shardwise.nn.attention.long_context import CUDNN, attend_long, is_long
from shardwise.nn.attention.softcap import attend_capped, reference, softmax_with

KERNEL_TYPES = (torch.bfloat16, torch.float16)
# torch 2.11's function takes fewer heads of keys without being told.
GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
KERNEL_OPTIONS: dict[str, Any] = {"enable_gqa": True} if GQA else {}

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed from queries and keys, and what is applied to them before the values."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # one more score for each head, which has no value
    dropout: float = 0.0


def built_with(model_class: Any, config: Any, attention: str | None, **options: Any) -> Any:
    """Returns a model of an auto class with this attention, whether or not its class declares support for it.

    Our functions are in the registries afterwards: SDPA without them computes something else for some models.
    """
    register()
    config = copy.deepcopy(config)  # building names its attention in it
    if attention is None:
        return model_class.from_config(config, **options)
    try:
        return model_class.from_config(config, attn_implementation=attention, **options)
    except ValueError:
        if attention == "eager":
            raise
    model = model_class.from_config(config, attn_implementation="eager", **options)
    set_attention(model, attention)
    return model


def _configs(model: Any) -> dict[int, Any]:
    """The configs of a model's parts that name an attention."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in configs if is_config(config)}


def set_attention(model: Any, name: str) -> None:
    """Sets the attention of every part of a model."""
    for config in _configs(model).values():
        set_attention_of(config, name)


@contextlib.contextmanager
def attention_as(model: Any, name: str) -> Iterator[None]:
    """Sets the attention of every part of a model inside the block."""
    previous = [(config, attention_of(config)) for config in _configs(model).values()]
    set_attention(model, name)
    try:
        yield
    finally:
        for config, name_before in previous:
            set_attention_of(config, name_before)


def install(model: Any) -> bool:
    """Registers our functions; returns False if this model uses other attention, and needs the plain path."""
    register()
    return {attention_of(config) for config in _configs(model).values()} <= {"sdpa", "eager"}


def register() -> None:
    """Registers our functions with transformers, once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    masks = AttentionMaskInterface()
    attentions = AttentionInterface()
    for name in ("sdpa", "eager"):
        if not _is_ours(masks[name]):
            AttentionMaskInterface.register(name, partial(mask_documents, masks[name], name == "sdpa"))
    if not _is_ours(attentions["sdpa"]):
        AttentionInterface.register("sdpa", partial(attend_documents, attentions["sdpa"]))


def _is_ours(function: Any) -> bool:
    return isinstance(function, partial) and function.func in (mask_documents, attend_documents)


def largest_head(device: torch.device) -> int:
    """Returns the largest head size of the device's flash kernel; 0 = it has none.

    Backward of the largest heads needs a data-centre card.
    """
    if stands_in():
        return 192
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return 0
    return 256 if torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0)) else 192


def mask_documents(plain: Callable[..., Any], standing: bool, *args: Any, **kwargs: Any) -> Any:
    """Mask function for the registry: a stand-in if the rule is (sliding-window) causal, else a real mask.

    `plain`: the function for batches without documents. `standing`: whether the attention of this name takes a
    DocumentMask.
    """
    rows = kwargs.get("attention_mask")
    if isinstance(rows, OwnRows):
        return rows.for_blocks(partial(mask_documents, plain, standing), **kwargs)
    if not isinstance(rows, RowsMask):
        return plain(*args, **kwargs)
    from transformers import masking_utils

    documents = rows.documents
    assert kwargs["q_length"] == kwargs["kv_length"] == documents.width, "packed batches know no cache"
    rule = kwargs.get("mask_function", masking_utils.causal_mask_function)
    size = kwargs.get("local_size")
    if standing and kwargs.get("allow_is_causal_skip", True):
        head = largest_head(rows.device)
        if rule is masking_utils.causal_mask_function:
            return DocumentMask(documents, None, head)
        if size and _same_rule(rule, masking_utils.sliding_window_causal_mask_function(size)):
            return DocumentMask(documents, size, head)
    if size and _same_rule(rule, masking_utils.chunked_causal_mask_function(size, rows.real)):
        rule = _within_documents(rule, documents.positions)
    rule = masking_utils.and_masks(rule, masking_utils.packed_sequence_mask_function(documents.index))
    changes = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "attention_mask": None}
    return plain(*args, **kwargs | changes | {"mask_function": rule})


def _same_rule(a: Any, b: Any) -> bool:
    """Whether two mask functions are made by the same code from the same numbers (tensors hold padding: none here)."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return a.__code__ is b.__code__ and _same_rule(_captured(a), _captured(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same_rule(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, torch.Tensor) if isinstance(b, torch.Tensor) else type(a) is type(b) and a == b


def _captured(function: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def _within_documents(rule: Callable[..., Any], positions: torch.Tensor) -> Callable[..., Any]:
    """Converts a rule about chunks of a row to one about chunks of a document."""
    return lambda b, h, q, k: rule(b, h, positions[b, q], positions[b, k])


def attend_documents(
    plain: Attention,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function for the registry: (rows, heads, width, head) in, (rows, width, heads, head) out."""
    if isinstance(attention_mask, OwnMask):
        options = {"module": module, "dropout": dropout, "scaling": scaling}
        return attention_mask.attend(plain, query, key, value, **options, **kwargs), None
    fallback = partial(plain, module, query, key, value, dropout=dropout, scaling=scaling, **kwargs)
    mask = attention_mask if isinstance(attention_mask, DocumentMask) else None
    if mask is not None and any((x.shape[0], x.shape[2]) != mask.rows_and_width for x in (query, key, value)):
        attention_mask = mask.real
        mask = None
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = Scores(scale, kwargs.get("softcap"), kwargs.get("s_aux"), dropout)
        if mask is None:
            return _capped_in_steps(module, query, key, value, attention_mask, scores, kwargs), None
        return _capped_documents(query, key, value, mask, scores), None
    if mask is None:
        return fallback(attention_mask=attention_mask)
    if kwargs.get("position_bias") is not None:
        return fallback(attention_mask=mask.real)
    documents = mask.documents
    if documents.alone and mask.covers(documents.width):  # nothing is packed: SDPA's own kernels are faster
        if query.dtype == torch.float32 and effective_device(query) == "cuda" and query.shape[1] != key.shape[1]:
            # The only kernel that takes fp32 wants as many keys as queries; else every score would be kept.
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
            fallback = partial(plain, module, query, key, value, dropout=dropout, scaling=scaling, **kwargs)
        if _in_long_kernel(module, query, key, value, mask, dropout):
            return attend_long(query, key, value, scaling), None
        return fallback(attention_mask=None, is_causal=True)
    if _kernel_takes(query, key, value, mask, dropout):
        return _in_one_kernel(query, key, value, mask, scaling), None
    if effective_device(query) == "cpu":
        return _one_by_one(query, key, value, mask, dropout, scaling), None
    return fallback(attention_mask=mask.bias(query.dtype))


def _capped_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: DocumentMask, scores: Scores
) -> torch.Tensor:
    """Softcaps and sinks: all documents in one kernel, or one by one with its reference."""
    q = _flat(query)
    k = _flat(key)
    v = _flat(value)
    options: Any = {"scale": scores.scale, "softcap": scores.softcap, "sinks": scores.sinks, "window": mask.window}
    if mask.spans is not None and _kernel_takes(query, key, value, mask, scores.dropout):
        return _in_rows(attend_capped(q, k, v, *mask.spans, mask.documents.longest, **options), mask)
    parts = zip(*(x.split(mask.documents.lengths) for x in (q, k, v)), strict=True)
    return _in_rows(torch.cat([reference(a, b, c, None, **options, dropout=scores.dropout) for a, b, c in parts]), mask)


def _capped_in_steps(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scores: Scores,
    kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Softcaps and sinks by plain operations, for any mask."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1) for x in (key, value))
    logits = (query @ key.transpose(-1, -2)).to(dtype) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if kwargs.get("position_bias") is not None:
        logits = logits + kwargs["position_bias"]
    causal = kwargs.get("is_causal")
    if mask is None and query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(dtype).min) if mask.dtype == torch.bool else logits + mask
    weights = softmax_with(logits, scores.sinks, scores.dropout)
    return (weights.to(value.dtype) @ value).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, width, head) as (tokens, heads, head)."""
    return x.transpose(1, 2).flatten(0, 1)


def _in_rows(x: torch.Tensor, mask: DocumentMask) -> torch.Tensor:
    """(tokens, heads, head) as (rows, width, heads, head)."""
    return x.reshape(mask.documents.rows, mask.documents.width, *x.shape[1:])


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: DocumentMask, dropout: float, scale: float | None
) -> torch.Tensor:
    """SDPA per document: computes the scores of documents only, not of full rows."""
    lengths = mask.documents.lengths
    if mask.covers(mask.documents.longest):
        q = _flat(query)
        k = _flat(key)
        v = _flat(value)
        return _in_rows(attend_in_groups(q, k, v, groups_of(mask.documents), dropout, scale), mask)
    outputs = []
    # split, not slices: its backward is one concatenation, that of a slice a tensor of zeros as large as the whole
    for q, k, v in zip(*(_flat(x).split(lengths) for x in (query, key, value)), strict=True):
        band = mask.band(len(q))
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
            attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        outputs.append(output[0].transpose(0, 1))
    return _in_rows(torch.cat(outputs), mask)


def _kernel_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: DocumentMask, dropout: float
) -> bool:
    """Whether the kernels over concatenated documents support this, and compute it right."""
    head = max(query.shape[-1], value.shape[-1])
    half = query.dtype == key.dtype == value.dtype and query.dtype in KERNEL_TYPES
    grouped = query.shape[1] % key.shape[1] == 0
    # Documents of one token each take a path of their own in the kernel, made for decoding.
    return half and grouped and dropout == 0.0 and head <= mask.largest_head and mask.documents.longest > 1


def _in_long_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask,
    dropout: float,
) -> bool:
    """Whether to use our operator: for a sequence so long that its heads are processed a few at a time, or because
    its output is to be saved (parallel/activations/saved_attention.py), if the kernels support it.
    """
    saves_output = getattr(module, "keeps_attention", False)
    same_head_size = query.shape[-1] == value.shape[-1]
    if effective_device(query) != "cuda":
        return saves_output and same_head_size and dropout == 0.0
    same_head_size = same_head_size and query.shape[-1] % 8 == 0
    return (saves_output or is_long(query)) and same_head_size and _kernel_takes(query, key, value, mask, dropout)


def _padded_heads(x: torch.Tensor, head: int) -> torch.Tensor:
    """Pads heads to this size, without a copy if nothing is missing."""
    if x.shape[-1] < head:
        return F.pad(x, (0, head - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: DocumentMask, scale: float | None
) -> torch.Tensor:
    """Flash attention over all documents at once."""
    documents = mask.documents
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    head = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    value_head = value.shape[-1]
    # The kernel wants one head size, a multiple of 8; zeros change neither scores nor the columns that are kept.
    q, k, v = (_padded_heads(_flat(x), head) for x in (query, key, value))
    bounds = documents.boundaries
    longest = documents.longest
    # Ours counts the token itself.
    window = (-1, 0) if mask.window is None or mask.covers(longest) else (mask.window - 1, 0)
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=window, **KERNEL_OPTIONS)
    assert isinstance(output, torch.Tensor)
    return _in_rows(output[..., :value_head], mask)


def fast_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Prefers cuDNN's attention from Hopper on: 1.8 times flash's speed on an H200 (466 against 258 TFLOP/s).

    Around backward as well: a block that is recomputed must choose the same kernel again.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CUDNN:
        return contextlib.nullcontext()
    kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kinds, set_priority=True)  # type: ignore[no-any-return]
