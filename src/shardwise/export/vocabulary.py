"""A tokenizer in GGUF's terms: tokens, types, scores or merges, special ids, and the pre-tokenizer.

llama.cpp brings its own pre-tokenizers and knows them by name (`tokenizer.ggml.pre`); a tokenizer with another one is
rejected, since the file would silently give other tokens than the model was trained on.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN_TAIL = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {  # how words are cut (in the tokenizer's own terms) → llama.cpp's name for it
    "bytes": "gpt-2",
    "digits, bytes": "smollm",
    "punctuation, bytes, numbers, /[0-9][0-9][0-9]/": "falcon",
    rf"/{_SUFFIXES}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}/": "llama-bpe",
    rf"/{_SUFFIXES}|{_WORD}\p{{L}}+|\p{{N}}|{_TAIL}/": "qwen2",
    rf"/{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|{_TEKKEN_TAIL}/": "tekken",
    r"/ ?[^(\s|[.,!?…。，、।۔،])]+/": "bloom",
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about tokens; `model` is gguf's name for the algorithm."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    template: Any = None
    more: dict[str, Any] = field(default_factory=dict)


def vocabulary_of(tokenizer: Any, size: int, field_name: str) -> Vocabulary:
    """Returns the vocabulary with exactly `size` entries; raises UserError if a GGUF file cannot hold it."""
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    if max(words) >= size:
        problem = f"has ids up to {max(words)}, the model's vocabulary has {size}"
        raise _refused(tokenizer, problem, field_name)
    tokens = [words.get(index, f"[PAD{index}]") for index in range(size)]
    types = [NORMAL if index in words else UNUSED for index in range(size)]
    for added in inner["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    model, pre, merges, scores, more = _algorithm(inner, tokens, types, tokenizer, field_name)
    without_special = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special = tokenizer("a")["input_ids"]
    extra = len(with_special) > len(without_special)
    return Vocabulary(
        model, pre, tokens, types, merges, scores, _ids(tokenizer),
        add_bos=extra and with_special[0] == tokenizer.bos_token_id and with_special[0] != without_special[0],
        add_eos=extra and with_special[-1] == tokenizer.eos_token_id,
        add_space_prefix=tokens[without_special[0]].startswith("▁"), template=tokenizer.chat_template, more=more,
    )  # fmt: skip


def _ids(tokenizer: Any) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {gguf: getattr(tokenizer, f"{name}_token_id") for name, gguf in names.items()}
    # Without one llama.cpp takes some id of GPT-2's for the beginning of text.
    ids["bos"] = ids["bos"] if ids["bos"] is not None else ids["eos"]
    return {name: int(value) for name, value in ids.items() if value is not None}


def _algorithm(
    inner: dict[str, Any], tokens: list[str], types: list[int], tokenizer: Any, field_name: str
) -> tuple[str, str, list[str] | None, list[float] | None, dict[str, Any]]:
    model = inner["model"]
    kind = inner["model"]["type"]
    normalizers = {part["type"] for part in _parts(inner["normalizer"], "normalizers")}
    if kind == "BPE":
        # Not by byte_fallback: tokenizers that come out of GGUF files have it set and never need it.
        by_bytes = any(part["type"] == "ByteLevel" for part in _parts(inner["pre_tokenizer"], "pretokenizers"))
        unsupported = normalizers - ({"NFC"} if by_bytes else {"Prepend", "Replace"})
        if unsupported:
            raise _refused(tokenizer, f"normalises by {', '.join(sorted(unsupported))}", field_name)
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        merges = [" ".join(pair) for pair in pairs]
        if by_bytes:
            return "gpt2", _pre_tokenizer(inner, tokenizer, field_name), merges, None, {}
        if not model.get("byte_fallback"):
            raise _refused(tokenizer, "has neither bytes nor a way back to them", field_name)
        _mark_bytes(tokens, types, tokenizer)
        return "llama", "default", merges, _scores(tokens, pairs), {}
    if kind == "Unigram":
        scores = [float(score) for _, score in model["vocab"]]
        scores += [0.0] * (len(tokens) - len(scores))
        types[model["unk_id"]] = UNKNOWN
        maps = [p for p in _parts(inner["normalizer"], "normalizers") if p["type"] == "Precompiled"]
        more: dict[str, Any] = {"remove_extra_whitespaces": "Replace" in normalizers or bool(maps)}
        if maps and maps[0].get("precompiled_charsmap"):
            more["precompiled_charsmap"] = base64.b64decode(maps[0]["precompiled_charsmap"])
        return "t5", "default", None, scores, more
    raise _refused(tokenizer, f"is a {kind} model", field_name)


def _mark_bytes(tokens: list[str], types: list[int], tokenizer: Any) -> None:
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = BYTE
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = UNKNOWN


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """SentencePiece joins the neighbours that make the best word; the best is the one that is merged first."""
    rank: dict[str, int] = {}
    for index, pair in enumerate(merges):
        rank.setdefault("".join(pair), index)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _parts(stage: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if stage is None:
        return []
    return list(stage[inner]) if stage["type"] == "Sequence" else [stage]


def _pre_tokenizer(inner: dict[str, Any], tokenizer: Any, field_name: str) -> str:
    """llama.cpp's name for the pre-tokenizer of a byte-level tokenizer."""
    steps = []
    for part in _parts(inner["pre_tokenizer"], "pretokenizers"):
        kind = part["type"]
        if kind == "ByteLevel":
            if part.get("add_prefix_space"):
                raise _refused(tokenizer, "puts a space before text", field_name)
            steps += ["bytes"] if part.get("use_regex", True) else []
        elif kind == "Digits":
            steps.append("digits" if part["individual_digits"] else "numbers")
        elif kind == "Split":
            steps.append(f"/{part['pattern'].get('Regex') or part['pattern'].get('String')}/")
        else:
            steps.append(kind.lower())
    description = ", ".join(steps)
    if description not in CUTS:
        raise _refused(
            tokenizer, f"cuts text in a way that llama.cpp has no name for ({description or 'none'})", field_name
        )
    return CUTS[description]


def _refused(tokenizer: Any, problem: str, field_name: str) -> UserError:
    name = type(tokenizer).__name__
    remedy = "export the model as a Hugging Face folder instead"
    return UserError(field_name, name, f"this tokenizer {problem}, which a GGUF file cannot say", remedy)
