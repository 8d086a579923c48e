"""Axes that do not fit: one message, with the legal values nearby."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import config_of
from transformers import AutoConfig

from shardwise.config import axes
from shardwise.config.axes import check_axes, check_model_axes
from shardwise.config.combinations import first_clash
from shardwise.config.load import load_run
from shardwise.config.resolve import resolve_machine
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.distributed.mesh import MeshLayout, layout_of
from shardwise.distributed.mesh_diagram import axis_lines, picture


def the_run(**parallel: Any) -> Run:
    return Run.model_validate({"model": "m", "data": {"train": "x"}, "objective": "causal", "parallel": parallel})


@pytest.mark.parametrize("installed", [(2, 11), (2, 12), (2, 13)])
def test_zbv_needs_a_torch_whose_split_backward_works(
    installed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(axes, "torch_version", lambda: installed)
    check_axes(the_run(pipeline=2, pipeline_schedule="interleaved"), 2)
    if installed >= (2, 13):
        check_axes(the_run(pipeline=2, pipeline_schedule="zbv", zero=0), 2)
        return
    with pytest.raises(
        UserError, match=r"parallel\.pipeline_schedule = 'zbv': needs torch 2\.13 or newer, and this is"
    ):
        check_axes(the_run(pipeline=2, pipeline_schedule="zbv", zero=0), 2)


@pytest.mark.parametrize(
    ("parallel", "ranks", "words"),
    [
        ({"tensor": 3}, 8, ["parallel.tensor = 3", "8 ranks", "[1, 2, 4, 8]"]),
        ({"tensor": 2, "context": 3}, 8, ["parallel.context = 3", "[1, 2, 4]"]),
        ({"tensor": 2, "pipeline": 16}, 8, ["parallel.pipeline = 16", "[1, 2, 4]"]),
        ({"pipeline": 2, "expert": 8}, 8, ["parallel.expert = 8", "4 ranks of a pipeline stage", "[1, 2, 4]"]),
    ],
)
def test_axes_that_do_not_fit_the_ranks(parallel: dict[str, Any], ranks: int, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check_axes(the_run(**parallel), ranks)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("family", "parallel", "words"),
    [
        ("llama", {"tensor": 8}, ["parallel.tensor = 8", "4 attention heads", "[1, 2, 4]"]),
        ("llama", {"context": 3, "context_kind": "ulysses"}, ["parallel.context = 3", "ring"]),
        ("llama", {"pipeline": 4}, ["parallel.pipeline = 4", "2 blocks", "2 or less"]),
        ("llama", {"expert": 2}, ["parallel.expert = 2", "dense", "leave it out"]),
        ("mixtral", {"expert": 8}, ["parallel.expert = 8", "4 experts", "[1, 2, 4]"]),
        ("t5", {"context": 2}, ["parallel.context = 2", "two sequences"]),
    ],
)
def test_axes_that_do_not_fit_the_model(family: str, parallel: dict[str, Any], words: list[str]) -> None:
    config = AutoConfig.for_model(**config_of(family))
    with pytest.raises(UserError) as error:
        check_model_axes(the_run(**parallel), config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_fits_is_taken() -> None:
    run = the_run(tensor=2, pipeline=2, context=2, expert=4)
    check_axes(run, 16)
    check_model_axes(run, AutoConfig.for_model(**config_of("mixtral")))
    first_clash(run)


def test_settings_without_their_axis() -> None:
    for parallel in ({"pipeline_schedule": "gpipe"}, {"context_kind": "ulysses"}, {"pipeline": 2, "virtual_stages": 2}):
        with pytest.raises(Exception, match=r"pipeline|context|chunks"):
            the_run(**parallel)


def test_where_ranks_sit() -> None:
    layout = layout_of(the_run(tensor=2, pipeline=2, context=2, zero=3).parallel, 16)
    assert layout == MeshLayout(1, 4, 2, 2, 2)
    places = [layout.place(rank) for rank in range(16)]
    assert len(set(places)) == 16 and layout.data == 2
    # Neighbours share a tensor group, then a context group.
    assert [(p.pipeline, p.data, p.context, p.tensor) for p in places[:5]] == [
        (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 0),
    ]  # fmt: skip
    drawn = picture(layout, per_node=8)
    assert "stage 1 data 1" in drawn and drawn.splitlines()[1].split()[-2:] == ["node", "0"] and "15" in drawn
    assert [line.split(":")[0] for line in axis_lines(layout)] == ["pipeline 2", "data 2", "context 2", "tensor 2"]


def test_expert_groups_lie_in_a_stage() -> None:
    assert MeshLayout(1, 4, 2, 2, 2, 4).expert_mesh == (2, 1, 2, 4)
    assert MeshLayout(4, 1, expert=2).expert_mesh == (1, 2, 1, 2)  # stage 0: copies, nothing divided
    assert MeshLayout(2, 2, tensor=2, expert=8).expert_mesh == (1, 1, 1, 8)


def test_stages_get_micro_batches_to_work_on() -> None:
    given = {"model": "m", "data": {"train": "x", "sequence_length": 64}, "device": "cpu", "ranks": 2}
    micro = {}
    for stages in (1, 2):
        run = Run.model_validate(given | {"train": {"batch_size": 16}, "parallel": {"pipeline": stages}})
        micro[stages] = resolve_machine(run).run.train.micro_batch_size
    assert micro == {1: 8, 2: 2}  # 16 rows: 8 for each of two ranks, or 8 twos for two stages


def test_what_others_call_them() -> None:
    with pytest.raises(UserError, match=r"parallel\.tensor"):
        load_run({"model": "m", "data": {"train": "x"}, "parallel": {"tp": 2}})
