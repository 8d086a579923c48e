"""How llama.cpp reads a GGUF file: the tensors that its loader requires, and how it interprets the settings.

Its loader rejects a file that lacks a required tensor, has one of another shape, or one that nothing reads. `READS` has
these rules for each architecture that we write, `meaning` how it interprets the settings. Facts of llama.cpp as of ggml
0.25 (PyPI's llama-cpp-python 0.3.36), whose logits for every row of the table were compared with ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Rows = dict[str, str]


@dataclass(frozen=True)
class GgufFile:
    """Settings and tensors of a file; shapes as in PyTorch."""

    arch: str
    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, np.ndarray]  # the factors of rotary scalings

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a setting of the architecture."""
        return self.fields.get(f"{self.arch}.{key}", default)


def open_gguf(file: Path) -> GgufFile:
    """Returns the settings and shapes of a file; tensors are not read."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items() if key != "tokenizer.ggml.merges"}
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    vectors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors if tensor.name.startswith("rope_")}
    return GgufFile(str(fields["general.architecture"]), fields, shapes, vectors)


# Tensors by name, `blk.N.` for those of each layer left out; shapes in the letters of `_sizes`. "?": may be missing.
def _both(name: str, shape: str, optional: str = "") -> Rows:
    """Weight and bias of a norm or a matrix; "?" for a bias that may be missing."""
    return {f"{name}.weight": shape, f"{name}.bias{optional}": shape.split()[0]}


def _attention(queries: str, bias: str | None = "?") -> Rows:
    """Separate projections, whose biases are read wherever the file has them."""
    rows = {"attn_q.weight": f"{queries} d", "attn_k.weight": "k d", "attn_v.weight": "w d",
            "attn_output.weight": f"d {queries}"}  # fmt: skip
    rows |= {"attn_q.bias?": queries, "attn_k.bias?": "k", "attn_v.bias?": "w"}
    return rows if bias is None else rows | {f"attn_output.bias{bias}": "d"}


BODY: Rows = {"token_embd.weight": "v d", "output_norm.weight": "d", "output.weight?": "v d"}
HEAD: Rows = {"output.weight": "v d"}
NORMS: Rows = {"attn_norm.weight": "d", "ffn_norm.weight": "d"}
GATED: Rows = {"ffn_gate.weight": "f d", "ffn_up.weight": "f d", "ffn_down.weight": "d f"}
EXPERTS: Rows = {"ffn_gate_inp.weight": "e d", "ffn_gate_exps.weight": "e x d", "ffn_up_exps.weight": "e x d",
                 "ffn_down_exps.weight": "e d x"}  # fmt: skip
SHARED: Rows = {"ffn_gate_inp_shexp.weight": "d", "ffn_gate_shexp.weight": "s d", "ffn_up_shexp.weight": "s d",
                "ffn_down_shexp.weight": "d s"}  # fmt: skip
LAYER_NORMS: Rows = _both("attn_norm", "d") | _both("ffn_norm", "d")
FACTORS: Rows = {"rope_factors_long.weight?": "r", "rope_factors_short.weight?": "r"}
QK_NORMS: Rows = {"attn_q_norm.weight": "hk", "attn_k_norm.weight": "hk"}
POST_NORMS: Rows = {"post_attention_norm.weight": "d", "post_ffw_norm.weight": "d"}
CLASSIC: Rows = LAYER_NORMS | _both("attn_qkv", "qkv d") | _both("attn_output", "d d") | _both("ffn_up", "f d") | _both(
    "ffn_down", "d f")  # fmt: skip
T5: Rows = {"attn_norm.weight": "d", "attn_rel_b.weight?": "b h", "attn_q.weight": "k d", "attn_k.weight": "k d",
            "attn_v.weight": "w d", "attn_o.weight": "d w", "ffn_norm.weight": "d", "ffn_gate.weight?": "f d",
            "ffn_up.weight": "f d", "ffn_down.weight": "d f"}  # fmt: skip
CROSS: Rows = {"cross_attn_norm.weight": "d", "cross_attn_q.weight": "k d", "cross_attn_k.weight": "k d",
               "cross_attn_v.weight": "w d", "cross_attn_o.weight": "d w",
               "cross_attn_rel_b.weight?": "b h"}  # fmt: skip

READS: dict[str, tuple[Rows, Rows]] = {  # of the model, of each layer
    "llama": (BODY | {"rope_freqs.weight?": "r"} | FACTORS, NORMS | GATED | _attention("q") | {
        "ffn_gate.bias?": "f", "ffn_up.bias?": "f", "ffn_down.bias?": "d"}),
    "qwen2": (BODY | {"output.bias?": "v"}, NORMS | GATED | _attention("d", None)),
    "qwen3": (BODY, NORMS | GATED | _attention("q", None) | QK_NORMS),
    "qwen2moe": (BODY | HEAD, NORMS | EXPERTS | SHARED | _attention("d", None)),
    "qwen3moe": (BODY, NORMS | EXPERTS | _attention("q", None) | QK_NORMS),
    "gpt2": (BODY | {"position_embd.weight": "c d", "output_norm.bias": "d"}, CLASSIC),
    "falcon": (BODY | {"output_norm.bias": "d"}, _both("attn_norm", "d") | {
        "attn_norm_2.weight?": "d", "attn_norm_2.bias?": "d", "attn_qkv.weight": "qkv d", "attn_output.weight": "d d",
        "ffn_up.weight": "f d", "ffn_down.weight": "d f"}),
    "phi3": (BODY | FACTORS, NORMS | {"attn_qkv.weight": "qkv d", "attn_output.weight": "d d", "attn_qkv.bias?": "qkv",
                                     "ffn_up.weight": "2f d", "ffn_down.weight": "d f"}),
    "bloom": (BODY | _both("token_embd_norm", "d") | {"output_norm.bias": "d"}, CLASSIC),
    "stablelm": (BODY | HEAD | {"output_norm.bias": "d"}, _both("attn_norm", "d") | GATED | _attention("d", None) | {
        "ffn_norm.weight?": "d", "ffn_norm.bias?": "d"}),
    "starcoder2": (BODY | {"output_norm.bias": "d"}, LAYER_NORMS | _attention("d", "") | _both("ffn_up", "f d") |
                   _both("ffn_down", "d f")),
    "nemotron": (BODY | HEAD | {"output_norm.bias": "d"}, LAYER_NORMS | _attention("d") | _both("ffn_up", "f d", "?") |
                 _both("ffn_down", "d f", "?")),
    "gemma2": ({name: shape for name, shape in BODY.items() if name != "output.weight?"},
               NORMS | GATED | _attention("q", None) | POST_NORMS),
    "gemma3": (BODY, NORMS | GATED | _attention("q", None) | POST_NORMS | QK_NORMS),
    "mamba": (BODY, {"attn_norm.weight": "d", "ssm_in.weight": "2i d", "ssm_conv1d.weight": "i n",
                     "ssm_conv1d.bias": "i", "ssm_x.weight": "t2 i", "ssm_dt.weight": "i t", "ssm_dt.bias": "i",
                     "ssm_a": "i st", "ssm_d": "i", "ssm_out.weight": "d i"}),
    "t5": ({"token_embd.weight": "v d", "output.weight?": "v d", "enc.output_norm.weight": "d",
            "dec.output_norm.weight": "d"}, {}),
}  # fmt: skip
LAYERS = {"t5": (("enc.blk.{}.", "block_count", T5), ("dec.blk.{}.", "decoder_block_count", T5 | CROSS))}
EPSILON = {"layer_norm_rms_epsilon": ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3", "gemma2", "gemma3",
                                      "mamba", "t5"),
           "layer_norm_epsilon": ("gpt2", "falcon", "bloom", "stablelm", "starcoder2", "nemotron")}  # fmt: skip


def refusal(file: GgufFile) -> str | None:
    """Returns why llama.cpp would not load a file; None if it would."""
    needed = ["context_length", "embedding_length", "block_count"]
    needed += [f"attention.{key}" for key, archs in EPSILON.items() if file.arch in archs]
    if missing_key := next((key for key in needed if file.get(key) is None), None):
        return f"it needs {file.arch}.{missing_key}, which the file does not say"
    if file.arch == "mamba" and file.get("ssm.inner_size") != 2 * file.get("embedding_length"):
        return "it takes Mamba models only whose inner size is twice their hidden size"
    sizes = _sizes(file)
    tensors = _tensors(file)
    for name, (shape, required) in tensors.items():
        if name not in file.shapes:
            if required:
                return f"it needs a tensor {name}, which the file lacks"
            continue
        expected = tuple(sizes[letter] for letter in shape.split())
        if file.shapes[name] != expected:
            return f"it takes {name} to be {list(expected)}, the file has {list(file.shapes[name])}"
    if unread := [name for name in file.shapes if name not in tensors]:
        others = f" and {len(unread) - 1} more tensors" if len(unread) > 1 else ""
        return f"it has no use for {unread[0]}{others} in files of {file.arch}, and refuses them"
    return None


def _tensors(file: GgufFile) -> dict[str, tuple[str, bool]]:
    """Every tensor that the loader reads: its shape, and whether it is required."""
    model, layer = READS[file.arch]
    rows = dict(model)
    for prefix, count, of_each in LAYERS.get(file.arch, (("blk.{}.", "block_count", layer),)):
        for number in range(int(file.get(count, file.get("block_count")))):
            rows |= {prefix.format(number) + name: shape for name, shape in of_each.items()}
    required = {name for name in rows if not name.endswith("?")}
    return {n.removesuffix("?"): (s, n.removesuffix("?") in required) for n, s in rows.items()}


def _sizes(file: GgufFile) -> dict[str, int]:
    """The sizes that shapes are made of."""
    d = int(file.get("embedding_length"))
    h = int(file.get("attention.head_count", 0) or 0)
    default_head_dim = d // h if h else 0
    hk = int(file.get("attention.key_length", default_head_dim))
    hv = int(file.get("attention.value_length", default_head_dim))
    kv = int(file.get("attention.head_count_kv", h))
    f = int(file.get("feed_forward_length", 0))
    inner = int(file.get("ssm.inner_size", 0))
    rank = int(file.get("ssm.time_step_rank", 0))
    used = max(1, int(file.get("expert_used_count", 1)))
    q = h * hk
    return {
        "d": d, "h": h, "hk": hk, "q": q, "k": kv * hk, "w": kv * hv, "qkv": d + 2 * kv * hv, "f": f, "2f": 2 * f,
        "v": len(file.fields["tokenizer.ggml.tokens"]), "c": int(file.get("context_length")),
        "r": int(file.get("rope.dimension_count", hk)) // 2, "e": int(file.get("expert_count", 0)),
        "x": int(file.get("expert_feed_forward_length", f // used)),
        "s": int(file.get("expert_shared_feed_forward_length", f)),
        "b": int(file.get("attention.relative_buckets_count", 0)),
        "i": inner, "2i": 2 * inner, "n": int(file.get("ssm.conv_kernel", 0)), "t": rank,
        "st": int(file.get("ssm.state_size", 0)), "t2": rank + 2 * int(file.get("ssm.state_size", 0)),
    }  # fmt: skip


def meaning(file: GgufFile) -> dict[str, Any]:
    """Returns how llama.cpp interprets a file, as keys of transformers' configs that transformers may not read."""
    return {**_common(file), **MEANINGS.get(file.arch, lambda _: {})(file)}


def _common(file: GgufFile) -> dict[str, Any]:
    if file.arch in ("gpt2", "bloom", "mamba", "t5"):
        return {}
    return {"rope_parameters": rope_meaning(file), "head_dim": _sizes(file)["hk"]}


def rope_meaning(file: GgufFile) -> dict[str, Any]:
    """Returns the rotary embedding: its base, the rotated share of a head, and its scaling."""
    base = {"rope_theta": float(file.get("rope.freq_base", 10000.0))}
    share = int(file.get("rope.dimension_count", 0) or 0) / max(1, _sizes(file)["hk"])
    base |= {"partial_rotary_factor": share} if share not in (0, 1) else {}
    kind = file.get("rope.scaling.type", "none")
    factor = float(file.get("rope.scaling.factor", 0) or 1)
    original_context = int(file.get("rope.scaling.original_context_length", file.get("context_length")))
    if "rope_freqs.weight" in file.vectors:
        divisors = file.vectors["rope_freqs.weight"].reshape(-1)
        return base | (
            _llama3(divisors, base["rope_theta"])
            or _factors(divisors.tolist(), divisors.tolist(), original_context, 1.0)
        )
    if kind == "longrope" and "rope_factors_long.weight" in file.vectors:
        short, long = (file.vectors[f"rope_factors_{length}.weight"].tolist() for length in ("short", "long"))
        return base | _factors(short, long, original_context, float(file.get("rope.scaling.attn_factor", 1.0)))
    if kind == "yarn":
        # The limits of the ramp are built in; no architecture here reads others.
        return base | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_context,
                       "attention_factor": (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)}  # fmt: skip
    return base | ({"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"})


def _llama3(divisors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """Llama 3's scaling, if these divisors of the frequencies are those of all models of that family."""
    factor = float(divisors.max())
    low = 1.0
    high = 4.0
    original_context = 8192
    turns = original_context * theta ** -(np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4):
        return None
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original_context}  # fmt: skip


def _factors(short: list[float], long: list[float], first: int, scale: float) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": scale,
            "original_max_position_embeddings": first}  # fmt: skip


def _llama(file: GgufFile) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}


def _experts(file: GgufFile) -> dict[str, Any]:
    sizes = _sizes(file)
    biased = _has(file, "attn_q.bias")
    return {"moe_intermediate_size": sizes["x"], "shared_expert_intermediate_size": sizes["s"], "qkv_bias": biased,
            "attention_bias": biased, "norm_topk_prob": file.arch == "qwen3moe"}  # fmt: skip


def _falcon(file: GgufFile) -> dict[str, Any]:
    sizes = _sizes(file)
    kv = int(file.get("attention.head_count_kv", 1))
    return {"multi_query": kv == 1, "num_kv_heads": kv, "parallel_attn": True, "bias": False, "alibi": False,
            "new_decoder_architecture": _has(file, "attn_norm_2.weight"), "ffn_hidden_size": sizes["f"],
            "layer_norm_epsilon": file.get("attention.layer_norm_epsilon")}  # fmt: skip


def _partial(file: GgufFile) -> dict[str, Any]:
    share = rope_meaning(file).get("partial_rotary_factor", 1.0)
    return {"partial_rotary_factor": share}


def _phi3(file: GgufFile) -> dict[str, Any]:
    return _partial(file) | {
        "sliding_window": None,  # read, and switched off
        "original_max_position_embeddings": int(
            file.get("rope.scaling.original_context_length", file.get("context_length"))
        ),
    }


def _nemotron(file: GgufFile) -> dict[str, Any]:
    return _partial(file) | _llama(file) | {"norm_eps": file.get("attention.layer_norm_epsilon")}


def _gemma(file: GgufFile) -> dict[str, Any]:
    sizes = _sizes(file)
    layers = int(file.get("block_count"))
    largest_depth, period = (46, 2) if file.arch == "gemma2" else (62, 6)
    kinds = ["sliding_attention" if n % period else "full_attention" for n in range(1, layers + 1)]
    scale = sizes["d"] / sizes["h"] if layers == largest_depth else sizes["hk"]
    window = file.get("attention.sliding_window")
    settings = {"query_pre_attn_scalar": scale, "layer_types": kinds, "sliding_window": window}
    if file.arch == "gemma2":
        return settings | {
            "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        }
    local_rope = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", 10000.0))}
    return settings | {"rope_parameters": {"full_attention": rope_meaning(file), "sliding_attention": local_rope}}


def _t5(file: GgufFile) -> dict[str, Any]:
    gated = "enc.blk.0.ffn_gate.weight" in file.shapes
    return {"num_decoder_layers": int(file.get("decoder_block_count", file.get("block_count"))),
            "feed_forward_proj": "gated-gelu" if gated else "relu", "is_gated_act": gated,
            "dense_act_fn": "gelu_new" if gated else "relu"}  # fmt: skip


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}" in file.shapes


MEANINGS: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama, "qwen2moe": _experts, "qwen3moe": _experts, "falcon": _falcon, "phi3": _phi3,
    "qwen3": lambda file: {"attention_bias": _has(file, "attn_output.bias")},
    "gpt2": lambda file: {"n_positions": _sizes(file)["c"], "n_inner": _sizes(file)["f"]},
    "stablelm": _partial, "starcoder2": lambda _: {"sliding_window": None}, "nemotron": _nemotron,
    "gemma2": _gemma, "gemma3": _gemma, "t5": _t5,
}  # fmt: skip


def layer_of(name: str) -> str:
    """Returns a tensor's name without its layer number, for messages about many."""
    return re.sub(r"\.\d+\.", ".N.", name)
