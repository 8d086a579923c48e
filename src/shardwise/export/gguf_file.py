"""Writes a model as one GGUF file for llama.cpp and its kin, tensor by tensor.

One tensor is held at a time, in its stored dtype and in the file's. Vectors, norms and routers stay in fp32; with 4 and
5 bits the embedding and the head get 8, as their errors affect every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.errors import UserError
from shardwise.export.families import Family, family_of, split_experts
from shardwise.export.rope import rope_tensors
from shardwise.export.vocabulary import Vocabulary, vocabulary_of
from shardwise.nn.models.source import ModelSource

KINDS = {  # name → (gguf's tensor type, its name for such files)
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q5_1": ("Q5_1", "MOSTLY_Q5_1"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}
COARSE = ("Q5_1", "Q5_0", "Q4_1", "Q4_0")
WHOLE = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "position_embd.weight",
    "ssm_conv1d.weight",
    "ssm_a",
    "attn_rel_b.weight",
)
PIECE = 16 << 20  # numbers that are converted at a time


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file; `source` names the parameter it is made of."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: Any


@dataclass(frozen=True)
class GgufPlan:
    """Everything that is decided before a byte is written."""

    source: ModelSource
    family: Family
    kind: str
    vocabulary: Vocabulary
    tensors: list[Tensor]
    files: dict[str, tuple[str, Path]]  # parameter → its name in a safetensors file


def plan_gguf(source: ModelSource, kind: str, field: str = "--gguf", unreadable: bool = False) -> GgufPlan:
    """Checks that a model can become a GGUF file and plans each tensor; raises UserError with what cannot."""
    from shardwise.nn.models.build import build_on_meta
    from shardwise.nn.models.readable import readable
    from shardwise.nn.models.stored import tensor_files
    from shardwise.nn.models.weights import match_names

    if kind not in KINDS:
        raise UserError(field, kind, "is not known", f"use one of {', '.join(KINDS)}")
    family = family_of(source.config, field, unreadable)
    model = build_on_meta(source)
    source = readable(source, model)
    assert source.weights is not None
    stored = tensor_files(source.weights)
    names = match_names(model, stored)
    assert names is not None
    tensors = [
        Tensor(gguf_name, name, tuple(part.shape), _kind_of(gguf_name, tuple(part.shape), kind))
        for name, parameter in model.named_parameters()
        for gguf_name, part in _gguf_tensors(source, family, name, parameter.detach(), field)
    ]
    family.settings(source.config)  # a setting that the file cannot say is found here
    vocabulary = vocabulary_of(source.load_tokenizer(), source.config.vocab_size, field)
    files = {name: (key, stored[key]) for name, key in names.items()}
    return GgufPlan(source, family, kind, vocabulary, tensors, files)


def _gguf_tensors(
    source: ModelSource, family: Family, name: str, tensor: torch.Tensor, field: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors in the file that a parameter becomes (on meta tensors, to learn the shapes)."""
    for part_name, part in split_experts(name, tensor):
        gguf_name = _gguf_name(source.config, family, part_name)
        if gguf_name is None:
            problem = f"{family.arch} files have no tensor for its {name}"
            raise UserError(field, source.config.model_type, problem, "export it as a Hugging Face folder instead")
        yield gguf_name, family.stored(gguf_name, part, source.config)
        if gguf_name in family.twice and source.config.tie_word_embeddings:
            yield family.twice[gguf_name], part


def _gguf_name(config: Any, family: Family, name: str) -> str | None:
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.arch)
    layers = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", 0) or 0)
    names = _name_map(arch, layers)
    bare = name.removeprefix("transformer.")  # some are known without the name of the model's body
    for candidate in (name, bare):
        if (gguf_name := names.get_name(candidate, try_suffixes=(".weight", ".bias"))) is not None:
            return str(gguf_name)
    return None


@cache
def _name_map(arch: Any, layers: int) -> Any:
    import gguf

    return gguf.get_tensor_name_map(arch, layers)


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> Any:
    import gguf

    type_name = KINDS[kind][0]
    if len(shape) < 2 or name.endswith(WHOLE):
        type_name = "F32"
    elif type_name in COARSE and name in ("token_embd.weight", "output.weight"):
        type_name = "Q8_0"
    tensor_type = gguf.GGMLQuantizationType[type_name]
    if shape and shape[-1] % gguf.GGML_QUANT_SIZES[tensor_type][0]:
        return gguf.GGMLQuantizationType.F16  # rows that are no whole number of blocks
    return tensor_type


def write_gguf(plan: GgufPlan, target: Path, name: str, say: Callable[[str], None] = lambda _: None) -> None:
    """Writes the file; on failure a partial file is left, which the caller removes."""
    import gguf

    config = plan.source.config
    extra = [(extra_name, tensor.numpy()) for extra_name, tensor in rope_tensors(config)]
    writer = gguf.GGUFWriter(target, plan.family.arch)
    writer.add_name(_safe_name(name, plan.vocabulary))
    writer.add_file_type(gguf.LlamaFileType[KINDS[plan.kind][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in plan.family.settings(config).items():
        _add(writer, f"{plan.family.arch}.{key}", value)
    _add_vocabulary(writer, plan.vocabulary)
    for extra_name, array in extra:
        writer.add_tensor_info(extra_name, array.shape, array.dtype, array.nbytes)
    for item in plan.tensors:
        rows = gguf.quants.quant_shape_to_byte_shape(item.shape, item.kind) if _packed(item.kind) else None
        dtype = np.dtype(np.uint8) if rows else np.dtype(np.float16 if item.kind.name == "F16" else np.float32)
        shape = rows or item.shape
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        writer.add_tensor_info(item.name, shape, dtype, size, raw_dtype=item.kind)
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, array in extra:
        writer.write_tensor_data(array)
    held: tuple[str, dict[str, torch.Tensor]] = ("", {})
    for item in plan.tensors:
        if held[0] != item.source:
            held = (
                item.source,
                dict(_gguf_tensors(plan.source, plan.family, item.source, _read(plan, item.source), "--gguf")),
            )
        writer.write_tensor_data(_encoded(held[1].pop(item.name), item))
    writer.close()
    say(f"wrote {len(plan.tensors)} tensors")


def _safe_name(name: str, words: Vocabulary) -> str:
    """Some readers interpret a file's name: transformers (5.17) fails on one called mistral, and llama.cpp looks for
    Phi-3's own tokens in one that has phi3 in it.
    """
    phi = "phi3" in name.lower() or "phi-3" in name.lower()
    if phi and not {"<unk>", "<s>", "<|endoftext|>"} <= set(words.tokens):
        return "model"
    return "Mistral" if name == "mistral" else name


def _packed(kind: Any) -> bool:
    return kind.name not in ("F32", "F16")


def _read(plan: GgufPlan, name: str) -> torch.Tensor:
    from safetensors import safe_open

    key, file = plan.files[name]
    with safe_open(file, framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(key)
    return tensor


def _encoded(tensor: torch.Tensor, entry: Tensor) -> np.ndarray:
    """A tensor in the file's dtype, converted in bounded pieces."""
    from gguf import quants

    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(1, -1)
    step = max(1, PIECE // max(1, rows.shape[1]))
    parts = []
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].float().contiguous().numpy()
        with np.errstate(over="ignore"):
            encoded = quants.quantize(part, entry.kind)
        if entry.kind.name == "F16" and not np.isfinite(encoded).all():
            problem = f"{entry.source} holds numbers that fp16 cannot (above 65504)"
            raise UserError("--gguf", "f16", problem, "use bf16, f32 or q8_0")
        parts.append(encoded)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_vocabulary(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
    if words.merges:
        writer.add_token_merges(words.merges)
    for name, value in words.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(words.add_eos)
    writer.add_add_space_prefix(words.add_space_prefix)
    if "remove_extra_whitespaces" in words.more:
        writer.add_remove_extra_whitespaces(words.more["remove_extra_whitespaces"])
    if "precompiled_charsmap" in words.more:
        writer.add_precompiled_charsmap(words.more["precompiled_charsmap"])
    if words.template:
        named = words.template.items() if isinstance(words.template, dict) else ()
        writer.add_chat_template([{"name": n, "template": t} for n, t in named] or words.template)
