"""Compares an exported model with the trained one: each parameter, and the logits of a few real token sequences.

The parameters tell exactly whether a file is what it should be: rounding moves none further than its dtype allows. The
logits tell what that does to the output, and find what the parameters cannot: a setting that was lost on the way.
Everything is computed in fp32 on the CPU, both models side by side.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardwise.core.compat.hf_private import attention_of
from shardwise.core.cpu_probe import free_memory
from shardwise.core.errors import RunFailed, UserError
from shardwise.nn.adapters.layers import adapter_layers, merged_parameters_by_probing
from shardwise.nn.adapters.peft import WEIGHTS
from shardwise.nn.models.names import link
from shardwise.nn.models.origin import Origin, counted
from shardwise.nn.models.source import first_line, load_config, quiet
from shardwise.nn.models.stored import read_stored, sample_digest, stored_tensors, tensor_files
from shardwise.nn.models.tasks import auto_class, task_of

SEQUENCES, LENGTH = 4, 64
TEXTS = (
    "The river rises in the hills, runs past three villages and an old mill, and meets the sea near the harbour.",
    "Q: What is 17 + 25? A: 17 + 25 = 42, because 17 + 20 = 37 and 37 + 5 = 42.",
    "def area(width: float, height: float) -> float:\n    return width * height  # in square metres\n",
    "Zürich, 東京 und São Paulo: naïve café, 100 € – ‘quoted’… Привет, мир! 🙂",
)


@dataclass(frozen=True)
class Bound:
    """How far rounding to a dtype may move things.

    `tensor`: a parameter's largest difference over its largest value; follows from the dtype. `logits`: their rms
    difference over their spread, through all layers; a wrong model has 1 and more.
    """

    tensor: float
    logits: float


BOUNDS = {
    "fp32": Bound(1e-6, 1e-5),
    "f32": Bound(1e-6, 1e-5),
    "fp16": Bound(5e-4, 0.05),
    "f16": Bound(5e-4, 0.05),
    "bf16": Bound(4e-3, 0.1),
    "q8_0": Bound(4.5e-3, 0.15),
    "q5_1": Bound(0.034, 0.6),
    "q5_0": Bound(0.064, 0.6),
    "q4_1": Bound(0.069, 0.9),
    "q4_0": Bound(0.13, 0.9),
}
SMALL = 1e-6  # what an offset by one costs a number in fp32 (norms that are stored as 1 + weight), and then some


class Mismatch(RunFailed):
    """An export that is not the model it should be."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: logits over all positions, and the parameter that moved furthest beyond its dtype."""

    kind: str
    largest: float
    mean: float
    relative: float
    same_top: float
    tokens: int
    parameter: str | None = None  # None: only logits were compared
    moved: float = 0.0
    setting: str | None = None  # one that is not the trained model's, though a few tokens may not show it

    @property
    def line(self) -> str:
        """One line for the terminal."""
        return f"checked against the trained model ({self.kind}, {self.tokens} tokens): {self.figures}"

    @property
    def figures(self) -> str:
        """How much the two differ."""
        bound = BOUNDS[self.kind]
        parameters = (
            f"; parameters differ by at most {self.moved:.2g} of their largest value (bound {bound.tensor:.2g})"
            if self.parameter is not None
            else ""
        )
        return (
            f"logits differ by at most {self.largest:.2g}, {self.mean:.2g} on average ({self.relative:.2%} of their "
            f"spread; bound {bound.logits:.3%}); same first choice {self.same_top:.1%}{parameters}"
        )

    @property
    def problem(self) -> str | None:
        """What is wrong; None if nothing is."""
        bound = BOUNDS[self.kind]
        if self.setting is not None:
            return self.setting
        if not self.moved <= bound.tensor:
            return (
                f"{self.parameter} differs from the trained one by {self.moved:.2g} of its largest value; rounding to "
                f"{self.kind} explains at most {bound.tensor:.2g}"
            )
        if not self.relative <= bound.logits:
            return (
                f"its logits differ from the trained model's by {self.relative:.2%} of their spread; rounding to "
                f"{self.kind} explains at most {bound.logits:.3%}"
            )
        return None


def too_large(parameters: int, copies: float) -> str | None:
    """Returns why a check is skipped if memory is short: it needs both models in fp32, and buffers for reading."""
    needed = int(4 * parameters * copies)
    free = free_memory()
    if needed <= 0.8 * free:
        return None
    return f"not checked: comparing takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def sample_ids(tokenizer: Any, vocabulary: int, samples: Sequence[Sequence[int]] = ()) -> list[torch.Tensor]:
    """Returns token sequences to compare on: the run's own if available, else from text through the tokenizer."""
    sequences = [list(sequence) for sequence in samples] or [tokenizer(text)["input_ids"] for text in TEXTS]
    return [torch.tensor([[i % vocabulary for i in ids[:LENGTH]]]) for ids in sequences[:SEQUENCES] if len(ids) > 1]


def load_folder(folder: Path, field: str = "model", trust: bool = False, extra: Container[str] | None = ()) -> Any:
    """Loads a Hugging Face folder in fp32 as its users do: nothing is supplied but the dtype to compute in.

    Raises UserError if transformers misses a tensor, or finds one that it has no place for and that is not in `extra`,
    those the model's source had too (None: not known).
    """
    config = load_config(folder, str(folder), trust)
    with quiet():
        model, report = auto_class(task_of(config)).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust
        )
    unplaced = link(model, tensor_files(folder)).extra
    allowed = {key for name, key in unplaced.items() if extra is None or name in extra}
    for problem_kind, names in (
        ("lacks", sorted(report["missing_keys"])),
        ("has in another shape", sorted(str(entry[0]) for entry in report["mismatched_keys"])),
        ("has, without a place for them in the model,", sorted(set(report["unexpected_keys"]) - allowed)),
    ):
        if names:
            problem = f"{problem_kind} {len(names)} tensors, {names[0]} among them"
            raise UserError(field, str(folder), problem, "export it again")
    return model.eval()


@torch.no_grad()
def compare(reference: Any, exported: Any, ids: Sequence[torch.Tensor], kind: str) -> Comparison:
    """Compares an exported model with the trained one: parameters and logits."""
    furthest, name = _parameters(reference, exported)
    setting = _rotary(reference, exported)
    _use_eager_attention(exported)
    logits = compare_logits(reference, partial(_logits, exported), ids, kind)
    return replace(logits, parameter=name, moved=furthest, setting=setting)


@torch.no_grad()
def compare_logits(
    reference: Any, exported: Callable[[torch.Tensor], torch.Tensor], ids: Sequence[torch.Tensor], kind: str
) -> Comparison:
    """Compares the logits that another reader computes with the trained model's."""
    _use_eager_attention(reference)
    largest = total = count = squares = 0.0
    spread = []
    same_top = 0
    tokens = 0
    for sequence in ids:
        expected = _logits(reference, sequence)
        actual = exported(sequence)
        expected, actual = expected[..., : actual.shape[-1]], actual[..., : expected.shape[-1]]
        difference = (expected - actual).abs()
        largest = max(largest, float(difference.max().nan_to_num(float("inf"))))
        total = total + float(difference.sum())
        count = count + difference.numel()
        squares += float(difference.double().pow(2).sum())
        spread.append(float(expected.std()))
        rows = expected.reshape(-1, expected.shape[-1]).argmax(-1)
        same_top += int((rows == actual.reshape(-1, actual.shape[-1]).argmax(-1)).sum())
        tokens += len(rows)
    width = max(sum(spread) / max(1, len(spread)), 1e-30)
    relative = (squares / max(1.0, count)) ** 0.5 / width
    return Comparison(kind, largest, total / max(1.0, count), relative, same_top / max(1, tokens), tokens)


def _rotary(reference: Any, exported: Any) -> str | None:
    """Whether rotary frequencies differ: scaling for long contexts hardly shows in a few tokens."""
    buffers = dict(exported.named_buffers())
    for name, expected in reference.named_buffers():
        if name.endswith("inv_freq"):
            actual = buffers.get(name)
            if actual is None or actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-4):
                return f"its rotary frequencies are not the trained model's ({name})"
    return None


def _use_eager_attention(model: Any) -> None:
    """Uses eager attention, which defines the model: faster kernels drop the softcaps of some models (Gemma 2)."""
    if attention_of(model.config) != "eager":
        with quiet():
            model.set_attn_implementation("eager")


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    return torch.as_tensor(model(**inputs).logits).float()


def _parameters(reference: Any, exported: Any) -> tuple[float, str]:
    """Largest difference of a parameter over its largest value, and its name; of the adapter's, if both have one."""
    exported_parameters = dict(exported.named_parameters(remove_duplicate=False))
    worst = (0.0, "")
    adapted = any(True for _ in adapter_layers(exported))
    for name, expected in reference.named_parameters() if adapted else merged_parameters_by_probing(reference):
        actual = exported_parameters.get(name)
        if actual is None or actual.shape != expected.shape:
            return float("inf"), name
        difference = float((expected.float() - actual.float()).abs().max()) - SMALL
        if not difference <= 0:
            worst = max(
                worst, (difference / max(float(expected.abs().max()), 1e-30), name), key=lambda candidate: candidate[0]
            )
            if difference != difference:
                return float("inf"), name
    return worst


def check_export(
    reference: Callable[[], Any], exported: Callable[[], Any], ids: Sequence[torch.Tensor], kind: str, target: Path
) -> str:
    """Compares and returns the line to print; raises Mismatch if they are not the same model."""
    outcome = compare(reference(), exported(), ids, kind)
    if outcome.problem is not None:
        raise Mismatch(f"{target}: the exported model is not the trained one: {outcome.problem}")
    return outcome.line


def check_peft(reference: Callable[[], Any], folder: Path, ids: Sequence[torch.Tensor], kind: str, target: Path) -> str:
    """Loads an adapter's folder with PEFT onto the base that the folder names, and returns a line.

    Raises Mismatch if it differs. If PEFT is not installed, the line says that it was not tried.
    """
    if find_spec("peft") is None:
        return "PEFT is not installed here: whether it reads the folder was not tried"
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    config = PeftConfig.from_pretrained(str(folder))
    trained = reference()
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The class that was trained: a config may name that of another head.
        base = type(trained).from_pretrained(
            config.base_model_name_or_path, revision=config.revision, dtype=torch.float32, config=trained.config,
            trust_remote_code=False,
        )  # fmt: skip
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        loaded = get_peft_model_state_dict(model)
    stored = load_file(folder / WEIGHTS)
    for name, tensor in stored.items():
        actual = loaded.get(name)
        if actual is None or not torch.equal(actual.to(tensor.dtype).cpu(), tensor):
            raise Mismatch(f"{target}: PEFT does not load {name} as the folder has it")
    outcome = compare_logits(trained, partial(_logits, model), ids, kind)
    if outcome.problem is not None:
        raise Mismatch(f"{target}: loaded by PEFT it is not the trained model: {outcome.problem}")
    return f"PEFT reads it: logits differ by {outcome.relative:.2%} of their spread"


def check_tensors(folder: Path, origin: Origin | None, allow_missing: bool = False) -> str | None:
    """Compares the tensors of a folder with those of the source: their names, and the untrained ones.

    Raises Mismatch. With `allow_missing`, tensors that were not trained may be missing.
    """
    if origin is None or not origin.tensors:
        return None
    tensors = stored_tensors(folder)
    missing = origin.tensors.keys() - tensors.keys()
    if unexpected := sorted(missing - origin.untouched.keys() if allow_missing else missing):
        raise Mismatch(f"{folder}: the export lacks {counted(unexpected, 'tensor')} of the source")
    for name, digest in origin.untouched.items():
        if name in missing:
            continue
        if sample_digest(read_stored(name, tensors[name])) != digest:
            raise Mismatch(f"{folder}: {name}, which training did not touch, is not as the source has it")
    count = len(origin.tensors)
    return f"{count - len(missing)} of the source's {count} tensors are there"


# What a run may change about a model's config: its type, its head, and ids that the source does not have.
CHANGES = {"dtype", "torch_dtype", "architectures", "quantization_config", "pad_token_id", "decoder_start_token_id",
           "id2label", "label2id"}  # fmt: skip


def check_config(folder: Path, expected: dict[str, Any], free: Container[str] = CHANGES) -> None:
    """Raises Mismatch if a folder's config is not `expected`: no training-only setting may be exported."""
    actual = json.loads((folder / "config.json").read_text())
    for key in {**expected, **actual}:
        expected_value = expected.get(key)
        actual_value = actual.get(key)
        # Parts of a model have dtypes of their own.
        if isinstance(expected_value, dict) and isinstance(actual_value, dict):
            expected_value = {k: v for k, v in expected_value.items() if k not in free}
            actual_value = {k: v for k, v in actual_value.items() if k not in free}
        if key not in free and expected_value != actual_value:
            raise Mismatch(
                f"{folder}: its config says {key}: {actual_value!r}, but the model came with {expected_value!r}"
            )


def compare_tokens(tokenizer: Any, file: Path, words: Any) -> str:
    """Reads the vocabulary back from a GGUF file, and reports whether transformers tokenises the same with it.

    Raises Mismatch if the file has other tokens. That transformers splits text its own way, whatever the file says, is
    no fault of the file: llama.cpp goes by the name of the pre-tokenizer.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    stored = GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    if stored != words.tokens:
        raise Mismatch(f"{file}: the vocabulary in the file is not the model's")
    summary = f"vocabulary: {len(stored)} words, cut as llama.cpp's {words.pre!r}"
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            reloaded = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)
            differing = [text for text in TEXTS if _tokens(tokenizer, text) != _tokens(reloaded, text)]
    except Exception as error:  # transformers' readers of tokenizers have exceptions of their own
        return f"{summary}; transformers cannot read the tokenizer from the file ({first_line(error)})"
    if differing:
        return f"{summary}; transformers makes other tokens of it: use the original tokenizer there"
    return f"{summary}; the same tokens when transformers reads it back"


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
