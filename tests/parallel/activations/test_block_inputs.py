"""ZeRO-R: block inputs divided over ranks, on the host, or both, against recomputation alone: equal to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import scenarios, zeror
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, tiny_run
from torch.distributed._composable import checkpoint as recompute

from shardwise.config.load import load_run
from shardwise.config.resolve import resolve_machine
from shardwise.core.errors import UserError
from shardwise.parallel.activations import block_inputs as activations
from shardwise.parallel.activations.block_inputs import BlockInputs

DROPOUT = GPT2 | {"resid_pdrop": 0.2, "attn_pdrop": 0.1}


@pytest.mark.parametrize(
    ("config", "ranks"),
    [(LLAMA, 2), pytest.param(LLAMA, 4, marks=pytest.mark.slow), (DROPOUT, 2)],
    ids=["2", "4", "gpt2-dropout"],
)
def test_divided_over_ranks(config: dict[str, Any], ranks: int) -> None:
    """33 tokens: the slices of four ranks are not even. Every full input is freed; what is held is 1/n of them."""
    plain, sliced = (run_ranks(zeror.block_gradients, ranks, config, kind) for kind in ("plain", "sliced"))
    for reference, result in zip(plain, sliced, strict=True):
        assert result["loss"] == reference["loss"]
        assert all(torch.equal(a, b) for a, b in zip(result["grads"], reference["grads"], strict=True))
        assert all(reference["alive"][0]), "without it every input lives until backward"
        assert not any(result["alive"][0]) and not any(result["alive"][1]), "nobody holds a full input"
        assert result["held"][0]["device"] == pytest.approx(result["full"] / ranks, rel=0.001)
        assert result["held"][0] == result["held"][2] and result["held"][1] == {"device": 0, "host": 0}


def test_divided_beside_sharding() -> None:
    """Four ranks: parameters sharded over two, activations divided over the other two."""
    plain, sliced, both = (
        run_ranks(zeror.block_gradients, 4, LLAMA, kind, 2) for kind in ("plain", "sliced", "sliced+host")
    )
    for reference, *others in zip(plain, sliced, both, strict=True):
        for result in others:
            assert all(torch.equal(a, b) for a, b in zip(result["grads"], reference["grads"], strict=True))
            assert not any(result["alive"][0])


@pytest.mark.parametrize("kind", ["host", "sliced+host"])
def test_on_the_host(kind: str) -> None:
    plain, hosted = (run_ranks(zeror.block_gradients, 2, LLAMA, k) for k in ("plain", kind))
    for reference, result in zip(plain, hosted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(result["grads"], reference["grads"], strict=True))
        share = 2 if "sliced" in kind else 1
        assert result["held"][0] == {"device": 0, "host": pytest.approx(result["full"] / share, rel=0.001)}
        assert result["held"][1] == {"device": 0, "host": 0}
        assert not any(result["alive"][0])


def test_the_run(tmp_path: Path) -> None:
    """The option, through the loop on two ranks at stage 3 with accumulation: same losses, norms and weights."""
    runs = [
        tiny_run(tmp_path, train__steps=4, parallel__zero=3, recompute="full", offload={"activations": where},
                 output=str(tmp_path / where))
        for where in ("none", "cpu")
    ]  # fmt: skip
    none, cpu = (run_ranks(scenarios.train, 2, run)[0] for run in runs)
    assert none[0] == cpu[0] and none[1] == cpu[1]
    assert all(torch.equal(none[2][name], cpu[2][name]) for name in none[2])


def test_it_needs_recomputation(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, offload={"activations": "cpu"})
    with pytest.raises(UserError, match=r"offload\.activations = 'cpu'.*\n.*recompute: full"):
        resolve_machine(load_run(run).run)


def shared_model(depth: int, place: bool) -> tuple[zeror.Shared, Any]:
    torch.manual_seed(0)
    model = zeror.Shared(64, depth)
    blocks = [(f"layers.{i}", layer) for i, layer in enumerate(model.layers)]
    for _, block in blocks:
        recompute(block)
    return model, BlockInputs(None, host=True).attach(blocks) if place else None


def test_what_many_blocks_share_is_put_away_once() -> None:
    """An encoder's output once, not per block; a mask, which has no gradient, not at all."""
    torch.manual_seed(1)
    x = torch.randn(8, 64, 64)

    def run(place: bool) -> tuple[list[torch.Tensor], dict[str, int]]:
        model, inputs = shared_model(4, place)
        out = model(x.clone().requires_grad_())
        held = inputs.held() if place else {}
        out.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], held

    (reference, _), (grads, held) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(grads, reference, strict=True))
    assert held["host"] == (4 + 1) * x.nbytes


def test_a_model_that_hands_over_nothing_is_refused() -> None:
    class Keyword(zeror.Shared):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x=x, extra=x, mask=torch.ones(1))
            return x

    model = Keyword(64, 2)
    blocks = [(str(i), layer) for i, layer in enumerate(model.layers)]
    for _, block in blocks:
        recompute(block)
    BlockInputs(None, host=True).attach(blocks)
    with pytest.raises(UserError, match="positional"):
        model(torch.randn(8, 64, 64, requires_grad=True))
    with torch.no_grad():
        model(torch.randn(8, 64, 64))  # nothing is saved, so nothing is amiss


def test_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the batch: as many buffers as a pass needs, and no new one once the longest has come."""
    model, _ = shared_model(3, True)
    made: list[int] = []
    real = torch.empty

    def count(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(args[0]) if kwargs.get("dtype") is torch.uint8 else None
        return real(*args, **kwargs)

    monkeypatch.setattr(activations.torch, "empty", count)
    counts, lengths = [], (32, 64, 16, 64, 48)
    for length in lengths:
        x = torch.randn(8, length, 64, requires_grad=True)
        model(x).square().mean().backward()
        counts.append(len(made))
    assert counts == [4, 8, 8, 8, 8], "three inputs and the shared one"


@pytest.mark.parametrize("far", [1, 3])
def test_inputs_of_the_first_blocks_only(far: int, tmp_path: Path) -> None:
    """A sketch of few layers foresees what the whole rehearsal holds; training does not change."""
    from shardwise.config.schema import Run
    from shardwise.foresight.plan.sketch import sketch
    from shardwise.foresight.rehearse.step import rehearse
    from shardwise.foresight.rehearse.tally import tally_of
    from shardwise.nn.models.source import ModelSource, config_from

    config = LLAMA | {"num_hidden_layers": 8}
    run = Run.model_validate({
        "model": {"config": config, "tokenizer": "none"}, "data": {"train": "x", "sequence_length": 4096},
        "objective": "causal", "precision": "bf16", "device": "cuda", "ranks": 1, "backend": "gloo",
        "recompute": "full", "train": {"batch_size": 1, "micro_batch_size": 1},
        "offload": {"activations": "cpu", "activation_blocks": far},
    })  # fmt: skip
    source = ModelSource("m", config_from(dict(config)), None, "none", task="causal")
    whole, few = tally_of(rehearse(source, run, 0, 1), 8), sketch(source, run, 1).at()
    print(f"\n{far}: whole {whole.peak:,.0f}, sketched {few.peak:,.0f}, on the host {whole.kept:,.0f} {few.kept:,.0f}")
    assert few.peak == pytest.approx(whole.peak, rel=0.01) and few.kept == pytest.approx(whole.kept, rel=1e-3)
    assert whole.kept == far * 4096 * LLAMA["hidden_size"] * 2
