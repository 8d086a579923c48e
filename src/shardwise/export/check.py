"""Compares an exported model with the trained one: each parameter, and the logits of a few real token sequences.

The parameters tell exactly whether a file is what it should be: rounding moves none further than its type allows. The
logits tell what that does to the answers, and find what the parameters cannot: a setting that was lost on the way.
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
from shardwise.nn.adapters.layers import adapter_layers, worn_parameters
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
    """How far rounding to a type may move things.

    `tensor`: a parameter's largest difference over its largest value; follows from the type. `logits`: their rms
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
    """The outcome: logits over all positions, and the parameter that moved furthest against what its type allows."""

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
        """For the terminal."""
        return f"checked against the trained model ({self.kind}, {self.tokens} tokens): {self.figures}"

    @property
    def figures(self) -> str:
        """How far apart the two are."""
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
        """What is wrong, if something is."""
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
    """Why a check is not made, if memory is short: both models in fp32, and what reading takes."""
    needed, free = int(4 * parameters * copies), free_memory()
    if needed <= 0.8 * free:
        return None
    return f"not checked: comparing takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def sample_ids(tokenizer: Any, vocabulary: int, samples: Sequence[Sequence[int]] = ()) -> list[torch.Tensor]:
    """Token sequences to compare on: the run's own if at hand, else from text through the tokenizer."""
    known = [list(one) for one in samples] or [tokenizer(text)["input_ids"] for text in TEXTS]
    return [torch.tensor([[i % vocabulary for i in ids[:LENGTH]]]) for ids in known[:SEQUENCES] if len(ids) > 1]


def load_folder(folder: Path, field: str = "model", trust: bool = False, extra: Container[str] | None = ()) -> Any:
    """A Hugging Face folder in fp32, as its readers load it: nothing is supplied but the type to compute in.

    Raises UserError where transformers misses a tensor, or finds one that it has no place for and that is not `extra`:
    one that the model's source had too (None: it is not known what that had).
    """
    config = load_config(folder, str(folder), trust)
    with quiet():
        model, report = auto_class(task_of(config)).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust
        )
    found = link(model, tensor_files(folder)).extra
    known = {key for name, key in found.items() if extra is None or name in extra}
    for what, wrong in (
        ("lacks", sorted(report["missing_keys"])),
        ("has in another shape", sorted(str(one[0]) for one in report["mismatched_keys"])),
        ("has, without a place for them in the model,", sorted(set(report["unexpected_keys"]) - known)),
    ):
        if wrong:
            problem = f"{what} {len(wrong)} tensors, {wrong[0]} among them"
            raise UserError(field, str(folder), problem, "export it again")
    return model.eval()


@torch.no_grad()
def compare(reference: Any, exported: Any, ids: Sequence[torch.Tensor], kind: str) -> Comparison:
    """Compares an exported model with the trained one: parameters and logits."""
    moved, name = _parameters(reference, exported)
    setting = _rotary(reference, exported)
    _define(exported)
    logits = compare_logits(reference, partial(_logits, exported), ids, kind)
    return replace(logits, parameter=name, moved=moved, setting=setting)


@torch.no_grad()
def compare_logits(
    reference: Any, exported: Callable[[torch.Tensor], torch.Tensor], ids: Sequence[torch.Tensor], kind: str
) -> Comparison:
    """Compares the logits that another reader computes with the trained model's."""
    _define(reference)
    largest = total = count = squares = 0.0
    spread, same, tokens = [], 0, 0
    for one in ids:
        wanted, got = _logits(reference, one), exported(one)
        wanted, got = wanted[..., : got.shape[-1]], got[..., : wanted.shape[-1]]
        apart = (wanted - got).abs()
        largest = max(largest, float(apart.max().nan_to_num(float("inf"))))
        total, count = total + float(apart.sum()), count + apart.numel()
        squares += float(apart.double().pow(2).sum())
        spread.append(float(wanted.std()))
        rows = wanted.reshape(-1, wanted.shape[-1]).argmax(-1)
        same += int((rows == got.reshape(-1, got.shape[-1]).argmax(-1)).sum())
        tokens += len(rows)
    width = max(sum(spread) / max(1, len(spread)), 1e-30)
    relative = (squares / max(1.0, count)) ** 0.5 / width
    return Comparison(kind, largest, total / max(1.0, count), relative, same / max(1, tokens), tokens)


def _rotary(reference: Any, exported: Any) -> str | None:
    """Whether rotary frequencies differ: what scales them for long contexts hardly shows in a few tokens."""
    found = dict(exported.named_buffers())
    for name, wanted in reference.named_buffers():
        if name.endswith("inv_freq"):
            got = found.get(name)
            if got is None or got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=1e-4):
                return f"its rotary frequencies are not the trained model's ({name})"
    return None


def _define(model: Any) -> None:
    """Attention as the model's own code defines it: faster ways drop the caps of some models (Gemma 2), both alike."""
    if attention_of(model.config) != "eager":
        with quiet():
            model.set_attn_implementation("eager")


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    return torch.as_tensor(model(**inputs).logits).float()


def _parameters(reference: Any, exported: Any) -> tuple[float, str]:
    """The furthest that a parameter moved, over its largest value, and its name; an adapter's own, if both wear one."""
    found, worst = dict(exported.named_parameters(remove_duplicate=False)), (0.0, "")
    adapted = any(True for _ in adapter_layers(exported))
    for name, wanted in reference.named_parameters() if adapted else worn_parameters(reference):
        got = found.get(name)
        if got is None or got.shape != wanted.shape:
            return float("inf"), name
        apart = float((wanted.float() - got.float()).abs().max()) - SMALL
        if not apart <= 0:
            worst = max(worst, (apart / max(float(wanted.abs().max()), 1e-30), name), key=lambda one: one[0])
            if apart != apart:
                return float("inf"), name
    return worst


def check_export(
    reference: Callable[[], Any], exported: Callable[[], Any], ids: Sequence[torch.Tensor], kind: str, target: Path
) -> str:
    """Compares and gives the line to print; raises Mismatch where they are not the same model."""
    outcome = compare(reference(), exported(), ids, kind)
    if outcome.problem is not None:
        raise Mismatch(f"{target}: the exported model is not the trained one: {outcome.problem}")
    return outcome.line


def check_peft(reference: Callable[[], Any], folder: Path, ids: Sequence[torch.Tensor], kind: str, target: Path) -> str:
    """An adapter's folder as PEFT loads it, onto the base that the folder names; raises Mismatch, gives a line.

    Where PEFT is not installed, says that it was not tried.
    """
    if find_spec("peft") is None:
        return "PEFT is not installed here: whether it reads the folder was not tried"
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    found = PeftConfig.from_pretrained(str(folder))
    trained = reference()
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The class that was trained: a config may name that of another head.
        base = type(trained).from_pretrained(
            found.base_model_name_or_path, revision=found.revision, dtype=torch.float32, config=trained.config,
            trust_remote_code=False,
        )  # fmt: skip
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        held = get_peft_model_state_dict(model)
    stored = load_file(folder / WEIGHTS)
    for name, tensor in stored.items():
        got = held.get(name)
        if got is None or not torch.equal(got.to(tensor.dtype).cpu(), tensor):
            raise Mismatch(f"{target}: PEFT does not load {name} as the folder has it")
    outcome = compare_logits(trained, partial(_logits, model), ids, kind)
    if outcome.problem is not None:
        raise Mismatch(f"{target}: loaded by PEFT it is not the trained model: {outcome.problem}")
    return f"PEFT reads it: logits differ by {outcome.relative:.2%} of their spread"


def check_tensors(folder: Path, origin: Origin | None, allow_missing: bool = False) -> str | None:
    """Compares the tensors of a folder with those of the source: their names, and those left alone; raises Mismatch.

    `allow_missing`: those that training did not touch may be missing.
    """
    if origin is None or not origin.tensors:
        return None
    found = stored_tensors(folder)
    lost = origin.tensors.keys() - found.keys()
    if wrong := sorted(lost - origin.untouched.keys() if allow_missing else lost):
        raise Mismatch(f"{folder}: the export lacks {counted(wrong, 'tensor')} of the source")
    for name, digest in origin.untouched.items():
        if name in lost:
            continue
        if sample_digest(read_stored(name, found[name])) != digest:
            raise Mismatch(f"{folder}: {name}, which training did not touch, is not as the source has it")
    count = len(origin.tensors)
    return f"{count - len(lost)} of the source's {count} tensors are there"


# What a run may change about a model's config: its type, its head, and ids that the source does not have.
CHANGES = {"dtype", "torch_dtype", "architectures", "quantization_config", "pad_token_id", "decoder_start_token_id",
           "id2label", "label2id"}  # fmt: skip


def check_config(folder: Path, wanted: dict[str, Any], free: Container[str] = CHANGES) -> None:
    """Raises Mismatch where a folder's config is not `wanted`: nothing that was set for training alone is handed on."""
    got = json.loads((folder / "config.json").read_text())
    for key in {**wanted, **got}:
        one, other = wanted.get(key), got.get(key)
        if isinstance(one, dict) and isinstance(other, dict):  # parts of a model have types of their own
            one, other = ({k: v for k, v in part.items() if k not in free} for part in (one, other))
        if key not in free and one != other:
            raise Mismatch(f"{folder}: its config says {key}: {other!r}, but the model came with {one!r}")


def compare_tokens(tokenizer: Any, file: Path, words: Any) -> str:
    """Reads the vocabulary back from a GGUF file, and says whether transformers makes the same tokens with it.

    Raises Mismatch where the file holds other words. That transformers cuts text its own way, whatever the file says,
    is no fault of the file: llama.cpp goes by the name of the cut.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    stored = GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    if stored != words.tokens:
        raise Mismatch(f"{file}: the vocabulary in the file is not the model's")
    said = f"vocabulary: {len(stored)} words, cut as llama.cpp's {words.pre!r}"
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            back = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)
            differing = [text for text in TEXTS if _tokens(tokenizer, text) != _tokens(back, text)]
    except Exception as error:  # transformers' readers of tokenizers have exceptions of their own
        return f"{said}; transformers cannot read the tokenizer from the file ({first_line(error)})"
    if differing:
        return f"{said}; transformers makes other tokens of it: use the original tokenizer there"
    return f"{said}; the same tokens when transformers reads it back"


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
