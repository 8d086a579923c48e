"""Feed-forward parts tile by tile: the same numbers, in less memory, found by what they do in any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import config_of
from support.tiny import LLAMA, saved_model, tiny_run, tokenizer_folder

from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.foresight.rehearse.ledger import ledger_of
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.zoo.run import tiny_case
from shardwise.launch.trainer import Trainer
from shardwise.nn.models.source import ModelSource, config_from
from shardwise.nn.tiled_mlp import tile_blocks, tokenwise

FOUND = {
    "llama": {"input_layernorm", "mlp", "post_attention_layernorm"},
    "gpt2": {"ln_1", "ln_2", "mlp"},
    "falcon": {"mlp", "input_layernorm"},
    "gemma3_text": {
        "input_layernorm", "mlp", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FOUND)
def test_parts_are_found_by_what_they_do(kind: str) -> None:
    case = tiny_case(kind, "causal")
    assert tokenwise(case.model().float(), case.inputs()) >= FOUND[kind]


def test_a_model_without_such_parts() -> None:
    case = tiny_case("bert", "masked")
    model = case.model().float()
    with pytest.raises(UserError, match="no feed-forward part"):
        tile_blocks(model, [(n, m) for n, m in model.named_modules() if n.endswith("layer.0")], model, case.inputs(),
                    8, True)  # fmt: skip


def losses(tmp: Path, model: Any, **changes: Any) -> list[float]:
    usual = {"train__steps": 4, "precision": "fp32", "train__schedule": "constant", "train__learning_rate": 1e-2}
    rows = Trainer(tiny_run(tmp, model, **(usual | changes))).fit().metrics
    return [row["loss"] for row in rows if row["kind"] == "train"]


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "recomputed, stage 3": ("llama", {"recompute": "full", "parallel__zero": 3, "ranks": 2}),
    "gpt2, with dropout": ("gpt2", {}),
    "lora": ("llama", {"method": {"type": "lora", "rank": 4, "dropout": 0.1}}),
    "mixed": ("llama", {"precision": "bf16"}),
    "in backward": ("llama", {"train__optimizer_in_backward": True, "train__max_grad_norm": None}),
    "t5": ("t5", {"objective": "seq2seq"}),
}
SLOW = ("mixed", "in backward", "t5")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in RUNS])
def test_training_is_the_same(name: str, tmp_path: Path) -> None:
    kind, changes = RUNS[name]
    config = config_of(kind) | ({"resid_pdrop": 0.1} if "dropout" in name else {})
    config |= {"dropout_rate": 0.0} if kind == "t5" else {}
    model: Any = {"config": config, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    if "method" in changes:
        model = saved_model(tmp_path / "model", config)
    if kind == "t5":
        (tmp_path / "pairs.jsonl").write_text('{"source": "a b c d e f g h", "target": "h g f e d c b a"}\n' * 40)
        changes = changes | {"data__train": str(tmp_path / "pairs.jsonl")}
    plain = losses(tmp_path / "plain", model, **changes)
    found = losses(tmp_path / "tiled", model, tiled_mlp=7, **changes)
    # Dropout draws other numbers for tiles than for the whole.
    drawn = "dropout" in name or name == "lora"
    bound = 0.05 if drawn else 2e-3 if name == "mixed" else 1e-5
    assert found == pytest.approx(plain, rel=bound) and found[-1] < found[0]


def test_what_is_drawn_in_backward_was_drawn_in_forward() -> None:
    """Of a tiled part with dropout, the derivative along a direction, against a difference."""
    from shardwise.nn.tiled_mlp import _Tiles

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = torch.nn.Linear(6, 6).double(), torch.nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.linear(x)).tanh()

    torch.manual_seed(0)
    part = Part()
    tiles = _Tiles(part, part.forward, 4, False)
    x, direction = torch.randn(2, 10, 6, dtype=torch.float64, requires_grad=True), torch.randn(2, 10, 6).double()

    def value(shift: float) -> torch.Tensor:
        torch.manual_seed(1)
        return tiles(x + shift * direction).sum()

    value(0.0).backward()
    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert x.grad is not None and float((x.grad * direction).sum()) == pytest.approx(float(slope), rel=1e-6)
    assert part.linear.weight.grad is not None


def test_a_rehearsal_sees_what_it_saves() -> None:
    def peak(**changes: Any) -> int:
        config = LLAMA | {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2}
        run = Run.model_validate({
            "model": {"config": config, "tokenizer": "none"}, "data": {"train": "x", "sequence_length": 65536},
            "objective": "causal", "precision": "bf16", "device": "cuda", "ranks": 1, "backend": "gloo",
            "recompute": "full", "train": {"batch_size": 1, "micro_batch_size": 1}, **changes,
        })  # fmt: skip
        source = ModelSource("m", config_from(dict(config)), None, "none", task="causal")
        return ledger_of(rehearse(source, run, 0, 1).tracker).peak

    whole, tiled = peak(), peak(tiled_mlp=2048)
    print(f"\n{whole / 2**20:,.0f} MiB → {tiled / 2**20:,.0f} MiB")
    assert tiled < 0.5 * whole
