"""Pipelines against one process: schedules on paper and on ranks, with sharding, recomputation and packed documents."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support import pipelines
from support.ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard

from shardwise.config.axes import ZBV_SINCE, torch_version
from shardwise.foresight.zoo.run import tiny_case
from shardwise.nn.tiny.case import CannotParallelize, TinyCase
from shardwise.parallel.pipeline.comm import decode_ports, encode_ports
from shardwise.parallel.pipeline.cut import balance, cut_model
from shardwise.parallel.pipeline.facts import probe
from shardwise.parallel.pipeline.programs import Exchange, Message, programs, run_blocked
from shardwise.parallel.pipeline.schedule import Action, Schedule, bubble, check_orders, picture, simulate
from shardwise.parallel.pipeline.stage import NonLastOutput, ShardLayout, StageInput, StageIO

HAS_ZBV = torch_version() >= ZBV_SINCE  # earlier ones lose gradients: T5's were 0.67 of the largest apart on 2.11
STYLES: list[tuple[Any, int]] = [
    ("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2),
]  # fmt: skip


def seconds(chunks: int) -> Any:
    return lambda action: {"forward": 1, "backward": 2, "input": 1, "weight": 1}[action.kind] / chunks


@pytest.mark.parametrize(("style", "chunks"), STYLES)
def test_every_order_is_complete_and_never_waits_for_ever(style: Any, chunks: int) -> None:
    for ranks in (1, 2, 3, 4, 8):
        for micros in (1, 2, 3, 5, 8, 16):
            check_orders(Schedule(style, chunks), ranks, micros)


def test_the_check_finds_what_is_missing_and_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = Action("forward", 0, 0), Action("backward", 0, 0)
    monkeypatch.setattr(Schedule, "orders", lambda *_: ((forward,),))
    with pytest.raises(ValueError, match="each of its actions once"):
        check_orders(Schedule("1f1b"), 1, 1)
    monkeypatch.setattr(Schedule, "orders", lambda *_: ((backward, forward),))
    with pytest.raises(ValueError, match="waits for ever"):
        check_orders(Schedule("1f1b"), 1, 1)


@pytest.mark.parametrize(("style", "chunks"), STYLES)
@pytest.mark.parametrize("forwards_only", [False, True])
def test_no_program_deadlocks_where_every_message_blocks_its_rank(style: Any, chunks: int, forwards_only: bool) -> None:
    schedule = Schedule(style, chunks)
    for ranks in (1, 2, 3, 4, 8):
        for micros in (1, 2, 3, 5, 8, 16, 33):
            run_blocked(programs(schedule, ranks, micros, forwards_only), schedule.owners(ranks))


def test_receives_that_are_posted_ahead_deadlock() -> None:
    """1F1B as it hung on NCCL: each stage asks for its next message while it computes with the one before."""
    first, last = programs(Schedule("1f1b"), 2, 4, False)
    first = ahead(first, Message("backward", 0, 1), Action("backward", 0, 0))
    last = ahead(last, Message("forward", 1, 2), Action("backward", 1, 1))
    with pytest.raises(ValueError, match="waits for ever"):
        run_blocked((first, last), (0, 1))


def ahead(program: Any, message: Message, before: Action) -> Any:
    """A program with one message posted before an action."""
    items = []
    for item in program:
        if item == before:
            items.append(Exchange((message,)))
        if isinstance(item, Exchange):
            item = Exchange(tuple(other for other in item.messages if other != message))
        items.append(item)
    return tuple(items)


def test_programs_that_lose_a_message_or_send_too_early_are_found() -> None:
    first, last = programs(Schedule("1f1b"), 2, 2, False)
    with pytest.raises(ValueError, match="waits for ever"):
        run_blocked((first, last[:-1]), (0, 1))
    with pytest.raises(ValueError, match="before it computed it"):
        run_blocked((first[1::-1] + first[2:], last), (0, 1))
    with pytest.raises(ValueError, match=r"before Message.* arrived"):
        run_blocked((first, last[1::-1] + last[2:]), (0, 1))


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubbles_are_as_known(ranks: int, micros: int) -> None:
    def share(style: Any, chunks: int = 1) -> float:
        return bubble(simulate(Schedule(style, chunks), ranks, micros, seconds(chunks)), ranks)

    plain = (ranks - 1) / (micros + ranks - 1)
    assert share("gpipe") == share("1f1b") == pytest.approx(plain)
    for chunks in (2, 3):
        assert share("interleaved", chunks) == pytest.approx((ranks - 1) / (chunks * micros + ranks - 1))
    assert share("naive") == pytest.approx(1 - 1 / ranks)
    assert share("zbv", 2) < share("interleaved", 2)


def test_a_picture_shows_who_waits() -> None:
    spans = simulate(Schedule("gpipe"), 2, 1, lambda _: 1.0)
    assert picture(spans, 2, 8) == "  0 F0....B0\n  1 ..F0B0.."


def test_parts_are_as_even_as_may_be() -> None:
    assert balance([1, 1, 1, 1], 2) == ((0, 2), (2, 4))
    assert balance([5, 1, 1, 1], 2) == ((0, 1), (1, 4))
    assert balance([1, 1, 1, 1], 2, [True, True, False, True]) == ((0, 1), (1, 4))
    assert balance([1, 1], 2, [True, False]) is None
    assert balance([3, 1, 1, 1, 3], 3) == ((0, 1), (1, 4), (4, 5))


def test_a_deep_model_is_cut_by_what_a_tiny_one_shows() -> None:
    """The embedding with the first blocks, the head with the last, whatever lies between has neither."""
    tiny = tiny_case("t5", "seq2seq")
    facts = probe(tiny)
    config = type(tiny.config)(**{**tiny.config.to_dict(), "num_layers": 9, "num_decoder_layers": 7})
    cut = cut_model(TinyCase(config, "seq2seq").model(), facts, 8)
    assert [call.block for call in cut.calls] == [
        *(f"encoder.block.{i}" for i in range(9)), *(f"decoder.block.{i}" for i in range(7)),
    ]  # fmt: skip
    assert [chunk for chunk in range(8) if cut.needs(chunk, "decoder.final_layer_norm.weight")] == [7]
    middle = next(chunk for chunk in range(8) if cut.ranges[chunk][0] <= 8 < cut.ranges[chunk][1])
    assert [chunk for chunk in range(8) if cut.needs(chunk, "encoder.final_layer_norm.weight")] == [middle]
    assert [chunk for chunk in range(8) if cut.needs(chunk, "shared.weight")] == [0, middle, 7]
    # An adapter goes where what it is on goes; of what nothing is known, every stage has one.
    assert not cut.needs(middle, "decoder.final_layer_norm.lora_A.weight") and cut.needs(7, "lm_head.lora_A.weight")
    assert cut.needs(3, "something.new")
    with pytest.raises(CannotParallelize, match="16 blocks cannot be divided among 17"):
        cut_model(TinyCase(config, "seq2seq").model(), facts, 17)


ROUNDED = 1e-5  # norms compute in single precision; what is wrong is off by 1e-2 and more


def right(found: dict[Any, Any]) -> bool:
    return all(verdict.right and verdict.gradient < ROUNDED for verdict in found.values())


def test_every_schedule_computes_what_one_process_does() -> None:
    for found in run_ranks(pipelines.by_schedules, 2, [("llama", "causal"), ("gpt2", "causal")], STYLES[:-2], 4):
        assert right(found), found


def test_zero_bubble_and_a_model_with_two_stacks() -> None:
    styles = [("1f1b", 1), ("zbv", 2)] if HAS_ZBV else [("1f1b", 1)]
    for found in run_ranks(pipelines.by_schedules, 2, [("t5", "seq2seq")], styles, 4):
        assert right(found), found


@pytest.mark.slow
def test_every_schedule_on_four_ranks() -> None:
    kinds = [("t5", "seq2seq")]
    for found in run_ranks(pipelines.by_schedules, 4, kinds, [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)], 4):
        assert right(found), found
    for found in run_ranks(pipelines.by_schedules, 4, [("gpt2", "causal")], [("1f1b", 1), ("gpipe", 1)], 3):  # < stages
        assert right(found), found


def test_stages_are_sharded_and_recompute() -> None:
    cases = [("1f1b", 1, 1, False), ("1f1b", 1, 3, True)]
    for found in run_ranks(pipelines.with_shards, 4, "gpt2", cases):
        assert right(found), found


@pytest.mark.slow
def test_every_zero_stage_with_every_schedule() -> None:
    styles = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
    cases = [(*style, zero, again) for style in styles for zero in range(4) for again in (False, True)]
    cases += [("zbv", 2, zero, False) for zero in range(3) if HAS_ZBV]
    for found in run_ranks(pipelines.with_shards, 4, "gpt2", cases):
        assert right(found), found


def test_zero_bubble_refuses_what_loses_gradients() -> None:
    for told in run_ranks(pipelines.refusals, 2):
        assert len(told) == 2 and "choose ZeRO 2 or less" in told[0] and "recompute each sharded block" in told[1]


def test_a_boundary_that_is_divided_over_ranks() -> None:
    for verdict in run_ranks(pipelines.divided, 4):
        assert verdict.right and verdict.gradient < ROUNDED, verdict


def test_packed_documents_of_different_widths() -> None:
    for verdict, boundaries in run_ranks(pipelines.packed, 2):
        assert verdict.right and verdict.gradient < ROUNDED, verdict
        assert boundaries == 2  # two of the three micro-batches have one shape: described once


def test_idle_time_is_measured_and_a_pipeline_has_less_of_it() -> None:
    for pipeline, naive, text in run_ranks(pipelines.idle, 2):
        assert 0.05 < pipeline < naive  # on paper 0.2 and 0.5, which is the least: one rank works at a time
        assert 0.5 <= naive < 0.95
        assert "F0" in text and len(text.splitlines()) == 2


def test_a_model_on_meta_computed_in_bf16() -> None:
    first, last = run_ranks(pipelines.from_meta, 2)
    for loss, gradient, _ in (first, last):
        assert loss < 0.1 and gradient < 0.3  # of bf16 alone: 0.02 and 0.06
    assert "model.embed_tokens.weight" in first[2] and "lm_head.weight" not in first[2]
    assert "lm_head.weight" in last[2] and "model.embed_tokens.weight" not in last[2]
    assert not {*first[2]} & {*last[2]}


def test_evaluation_logits_and_names() -> None:
    first, last = run_ranks(pipelines.other_uses, 2)
    for one in (first, last):
        assert one["verdict"].right
        assert one["apart"] < 1e-9
        assert "lies on another rank" in one["error"]
    assert first["evaluated"] == 0 and last["evaluated"] == pytest.approx(last["loss"])
    assert sorted({*first["names"], *last["names"]}) == first["whole"]
    assert {*first["names"]} & {*last["names"]} == {"transformer.wte.weight"}
    assert "transformer.wpe.weight" not in last["names"] and "transformer.ln_f.weight" not in first["names"]
    assert first["owners"] == last["owners"] and first["owners"]["transformer.wte.weight"] == (0, 1)


def after_resharding() -> list[float]:
    """The gradient of a norm that FSDP manages, in a backward that finds it resharded, through a boundary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> NonLastOutput:
            return NonLastOutput(StageIO((), (self.norm(x),)))

    torch.manual_seed(0)
    stage, x = Stage(), torch.randn(2, 4)
    fully_shard(stage, mesh=init_device_mesh("cpu", (2,)))
    outputs = [stage(x * scale).wire.tensors[0] for scale in (1.0, 2.0)]
    for output in outputs:  # the first one ends with the norm resharded
        output.square().sum().backward()
    gradient = stage.norm.weight.grad
    assert gradient is not None
    return list(gradient.full_tensor().tolist())  # type: ignore[attr-defined]


def test_parameters_are_gathered_again_before_the_backward_of_a_boundary() -> None:
    torch.manual_seed(0)
    norm, x = torch.nn.LayerNorm(4), torch.randn(2, 4)
    for scale in (1.0, 2.0):
        norm(x * scale).square().sum().backward()
    assert norm.weight.grad is not None
    for found in run_ranks(after_resharding, 2):
        assert found == pytest.approx(norm.weight.grad.tolist(), rel=1e-5)


def test_what_passes_at_a_boundary_is_told_as_data() -> None:
    layout = ShardLayout(("tensor", "data"), (Replicate(), Shard(1)), (2, 8), (8, 1))
    ports = (
        StageInput((0, 0), (2, 4), torch.bfloat16, True, layout),
        StageInput(("mask", 1), (3,), torch.int64, False),
    )
    assert decode_ports(encode_ports(ports)) == ports
    with pytest.raises(ValueError):
        decode_ports(pickle.dumps(ports))
