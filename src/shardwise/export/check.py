"""Compares an exported model with the trained one: each parameter, and the logits of a few real token sequences.

The parameters tell exactly whether a file is what it should be: rounding moves none further than its type allows. The
logits tell what that does to the answers, and find what the parameters cannot: a setting that was lost on the way.
Everything is computed in fp32 on the CPU, both models side by side.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.adapters.layers import adapter_layers, worn_parameters
from shardwise.errors import RunFailed, UserError
from shardwise.export.families import FAMILIES
from shardwise.export.rope import scaling_of
from shardwise.launch.cpu import free_memory
from shardwise.models.source import quiet
from shardwise.models.tasks import auto_class, task_of

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
    parameter: str
    moved: float

    @property
    def line(self) -> str:
        """For the terminal."""
        bound = BOUNDS[self.kind]
        return (
            f"checked against the trained model ({self.kind}, {self.tokens} tokens): logits differ by at most "
            f"{self.largest:.2g}, {self.mean:.2g} on average ({self.relative:.2%} of their spread; bound "
            f"{bound.logits:.3%}); same first choice {self.same_top:.1%}; parameters differ by at most "
            f"{self.moved:.2g} of their largest value (bound {bound.tensor:.2g})"
        )

    @property
    def problem(self) -> str | None:
        """What is wrong, if something is."""
        bound = BOUNDS[self.kind]
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


def load_folder(folder: Path, field: str = "model") -> Any:
    """A Hugging Face folder in fp32; raises UserError if it lacks tensors."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with quiet():
        model, report = auto_class(task_of(config)).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    return _complete(model, report, field, folder)


def load_gguf(file: Path, config: Any) -> Any:
    """A GGUF file in fp32 through transformers, with the settings it finds in the file.

    What transformers does not read from files of that family (`Family.unread`) comes from `config`.
    """
    from transformers import AutoConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "trust_remote_code": False}
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        found = AutoConfig.from_pretrained(**where)
        unread = FAMILIES[config.model_type].unread
        for key in (*unread, *(() if scaling_of(config) == "default" else ("rope_parameters",))):
            if hasattr(config, key):
                setattr(found, key, getattr(config, key))
        model, report = auto_class(task_of(config)).from_pretrained(
            **where, config=found, dtype=torch.float32, output_loading_info=True
        )
    return _complete(model, report, "target", file)


def _complete(model: Any, report: dict[str, Any], field: str, where: Path) -> Any:
    if missing := sorted(report["missing_keys"]):
        problem = f"lacks {len(missing)} tensors, {missing[0]} among them"
        raise UserError(field, str(where), problem, "export it again")
    return model.eval()


@torch.no_grad()
def compare(reference: Any, exported: Any, ids: Sequence[torch.Tensor], kind: str) -> Comparison:
    """Holds an exported model against the trained one."""
    moved, name = _parameters(reference, exported)
    largest = total = count = squares = 0.0
    spread, same, tokens = [], 0, 0
    for one in ids:
        wanted, got = _logits(reference, one), _logits(exported, one)
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
    return Comparison(kind, largest, total / max(1.0, count), relative, same / max(1, tokens), tokens, name, moved)


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


def compare_tokens(tokenizer: Any, file: Path, config: Any, words: Any) -> str:
    """Reads the vocabulary back from a GGUF file and compares tokens; raises Mismatch, gives a line to print.

    transformers cuts text its own way for some families, whatever the file says; then it cannot be asked.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    fields = GGUFReader(file).fields
    stored = fields["tokenizer.ggml.tokens"].contents()
    if stored != words.tokens:
        raise Mismatch(f"{file}: the vocabulary in the file is not the model's")
    if (words.model, words.pre) not in READ_BACK.get(FAMILIES[config.model_type].arch, ()):
        return f"vocabulary: {len(stored)} words as in the model (transformers does not cut text as the file says)"
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        back = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, trust_remote_code=False)
    for text in TEXTS:
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        got = back(text, add_special_tokens=False)["input_ids"]
        if wanted != got:
            raise Mismatch(f"{file}: read back, its tokenizer gives other tokens for {text!r}")
    return f"vocabulary: {len(stored)} words, the same tokens when read back"


_BYTES = (("gpt2", "gpt-2"),)
READ_BACK = {  # (algorithm, cut) that transformers makes of a file of each architecture
    "llama": (*_BYTES, ("llama", "default")),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2moe", "qwen3moe"), (("gpt2", "qwen2"),)),
    **dict.fromkeys(("gpt2", "falcon", "stablelm", "starcoder2", "bloom", "mamba", "nemotron"), _BYTES),
    "t5": (("t5", "default"),),
}
