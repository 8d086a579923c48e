"""Writes a model as one GGUF file for llama.cpp and its kin, tensor by tensor.

What is held at a time is one tensor, in the type it is stored in and in the file's. Vectors, norms and routers stay in
fp32; with 4 and 5 bits the embedding and the head get 8, as their errors touch every token.
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
    """One tensor of the file; `source` names the parameter that it is made of."""

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
    """Checks that a model can become a GGUF file and decides each tensor; raises UserError, naming what cannot."""
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
        Tensor(made, name, tuple(part.shape), _kind_of(made, tuple(part.shape), kind))
        for name, parameter in model.named_parameters()
        for made, part in _made(source, family, name, parameter.detach(), field)
    ]
    family.settings(source.config)  # a setting that the file cannot say is found here
    vocabulary = vocabulary_of(source.load_tokenizer(), source.config.vocab_size, field)
    files = {name: (key, stored[key]) for name, key in names.items()}
    return GgufPlan(source, family, kind, vocabulary, tensors, files)


def _made(
    source: ModelSource, family: Family, name: str, tensor: torch.Tensor, field: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a parameter becomes: names in the file and how they are laid out there (meta tensors tell the shapes)."""
    for part_name, part in split_experts(name, tensor):
        made = _gguf_name(source.config, family, part_name)
        if made is None:
            problem = f"{family.arch} files have no tensor for its {name}"
            raise UserError(field, source.config.model_type, problem, "export it as a Hugging Face folder instead")
        yield made, family.stored(made, part, source.config)
        if made in family.twice and source.config.tie_word_embeddings:
            yield family.twice[made], part


def _gguf_name(config: Any, family: Family, name: str) -> str | None:
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.arch)
    layers = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", 0) or 0)
    names = _name_map(arch, layers)
    bare = name.removeprefix("transformer.")  # some are known without the name of the model's body
    for one in (name, bare):
        if (found := names.get_name(one, try_suffixes=(".weight", ".bias"))) is not None:
            return str(found)
    return None


@cache
def _name_map(arch: Any, layers: int) -> Any:
    import gguf

    return gguf.get_tensor_name_map(arch, layers)


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> Any:
    import gguf

    wanted = KINDS[kind][0]
    if len(shape) < 2 or name.endswith(WHOLE):
        wanted = "F32"
    elif wanted in COARSE and name in ("token_embd.weight", "output.weight"):
        wanted = "Q8_0"
    chosen = gguf.GGMLQuantizationType[wanted]
    if shape and shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
        return gguf.GGMLQuantizationType.F16  # rows that are no whole number of blocks
    return chosen


def write_gguf(plan: GgufPlan, target: Path, name: str, say: Callable[[str], None] = lambda _: None) -> None:
    """Writes the file; a failure leaves a part of it behind, which is the caller's to remove."""
    import gguf

    config = plan.source.config
    extra = [(made, tensor.numpy()) for made, tensor in rope_tensors(config)]
    writer = gguf.GGUFWriter(target, plan.family.arch)
    writer.add_name(_harmless(name, plan.vocabulary))
    writer.add_file_type(gguf.LlamaFileType[KINDS[plan.kind][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in plan.family.settings(config).items():
        _add(writer, f"{plan.family.arch}.{key}", value)
    _add_vocabulary(writer, plan.vocabulary)
    for made, array in extra:
        writer.add_tensor_info(made, array.shape, array.dtype, array.nbytes)
    for one in plan.tensors:
        rows = gguf.quants.quant_shape_to_byte_shape(one.shape, one.kind) if _packed(one.kind) else None
        dtype = np.dtype(np.uint8) if rows else np.dtype(np.float16 if one.kind.name == "F16" else np.float32)
        shape = rows or one.shape
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        writer.add_tensor_info(one.name, shape, dtype, size, raw_dtype=one.kind)
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, array in extra:
        writer.write_tensor_data(array)
    held: tuple[str, dict[str, torch.Tensor]] = ("", {})
    for one in plan.tensors:
        if held[0] != one.source:
            held = (one.source, dict(_made(plan.source, plan.family, one.source, _read(plan, one.source), "--gguf")))
        writer.write_tensor_data(_encoded(held[1].pop(one.name), one))
    writer.close()
    say(f"wrote {len(plan.tensors)} tensors")


def _harmless(name: str, words: Vocabulary) -> str:
    """Some readers take a file's name for more than a name: transformers (5.17) fails on one called mistral, and
    llama.cpp looks for Phi-3's own tokens in one that has phi3 in it."""
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


def _encoded(tensor: torch.Tensor, one: Tensor) -> np.ndarray:
    """A tensor in the file's type, converted in bounded pieces."""
    from gguf import quants

    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(1, -1)
    step = max(1, PIECE // max(1, rows.shape[1]))
    parts = []
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].float().contiguous().numpy()
        with np.errstate(over="ignore"):
            made = quants.quantize(part, one.kind)
        if one.kind.name == "F16" and not np.isfinite(made).all():
            problem = f"{one.source} holds numbers that fp16 cannot (above 65504)"
            raise UserError("--gguf", "f16", problem, "use bf16, f32 or q8_0")
        parts.append(made)
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
