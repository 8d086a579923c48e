"""Who is late, from what each rank was doing: told apart for every way in which ranks can wait for each other."""

from __future__ import annotations

from typing import Any

from shardwise.train.watchdog.scene import PendingCollective, Scene
from shardwise.train.watchdog.verdict import Silent, judge


def scene(rank: int, begun: dict[str, int], waits: tuple[str, int] | None = None, **more: Any) -> Scene:
    """A rank of four; `waits` is a group and the number of a collective in it."""
    held = (PendingCollective(waits[0], waits[1], "all_gather", "8 Float", 30.0),) if waits else ()
    members = {"0": (0, 1, 2, 3), "a": (0, 1), "b": (2, 3)}
    values = {"doing": "computing", "module": "layers.1", "line": "forward (model.py:7)"} | more
    return Scene(rank, "host", 100 + rank, 5, waiting=held, begun=begun, members=members, **values)


def test_one_that_did_not_come() -> None:
    scenes = {r: scene(r, {"0": 7}, ("0", 7)) for r in (0, 1, 3)} | {
        2: scene(2, {"0": 6}, line="read (data/rows.py:3)")
    }
    verdict = judge(scenes, {}, 30.0)
    assert verdict.late == (2,)
    assert verdict.text.startswith("rank 2 kept the others waiting for 30 s (timeout) at step 5")
    assert "ranks 0, 1, 3 wait in all_gather number 7 of group 0 (8 Float), at layers.1" in verdict.text
    assert "1. its data come slowly" in verdict.text and "read (data/rows.py:3)" in verdict.text


def test_one_that_does_not_answer() -> None:
    scenes = {r: scene(r, {"0": 7}, ("0", 7)) for r in (0, 1, 2)}
    verdict = judge(scenes, {3: Silent(3, "host", 42, 5, "computing", "stopped")}, 30.0)
    assert verdict.late == (3,) and "does not answer: stopped" in verdict.text and "kill -CONT 42" in verdict.text
    away = judge(scenes, {3: Silent(3, "other", 42)}, 30.0)
    assert "1. its host is cut off" in away.text


def test_the_end_of_a_chain() -> None:
    """0 waits for 1 in one group, 1 waits for all in another: those who wait for nobody are to blame."""
    scenes = {
        0: scene(0, {"0": 3, "a": 5}, ("a", 5)), 1: scene(1, {"0": 4, "a": 4}, ("0", 4)),
        2: scene(2, {"0": 4}, ("0", 4)), 3: scene(3, {"0": 3}),
    }  # fmt: skip
    # 0 has not come to number 4 of group 0 either, but only because it waits for 1.
    assert judge(scenes, {}, 30.0).late == (3,)


def test_a_circle() -> None:
    scenes = {0: scene(0, {"0": 1, "a": 2}, ("a", 2)), 1: scene(1, {"0": 2, "a": 1}, ("0", 2))}
    verdict = judge(scenes, {}, 30.0)
    assert verdict.late == (0, 1) and "wait for each other" in verdict.text and "different ways" in verdict.text


def test_nobody_is_late() -> None:
    verdict = judge({r: scene(r, {"0": 7}, ("0", 7)) for r in range(4)}, {}, 30.0)
    assert verdict.late == () and "all ranks came to the same collective" in verdict.text and "network" in verdict.text


def test_a_scene_travels() -> None:
    one = scene(1, {"0": 2}, ("0", 2))
    assert Scene.from_json(one.to_json()) == one
