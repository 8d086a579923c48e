"""`train --profile`: a trace per rank, a summary in words, and a run that goes on as if nothing were."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support import cli
from support.tiny import tiny_run

from shardwise.train.profiling import Profiling


def test_two_steps_under_the_profiler(tmp_path: Path) -> None:
    output = tmp_path / "out"
    file = cli.write_run(tmp_path, tiny_run(tmp_path, train__steps=4, ranks=2, parallel__zero=3))
    code, _, err = cli.train(file, "--profile", "2,4")
    assert code == 0, err
    found = sorted(f.name for f in (output / "profile").iterdir())
    traces = [f"step-0000000{step}.rank-{rank}.trace.json" for step in (2, 4) for rank in (0, 1)]
    assert found == sorted([*traces, "step-00000002.txt", "step-00000004.txt"])
    trace = json.loads((output / "profile" / traces[0]).read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"shardwise::step", "shardwise::update"} <= names
    words = (output / "profile/step-00000002.txt").read_text()
    assert "products" in words and "collectives:" in words and "hidden behind computing" in words and "→ " in words
    plain = cli.write_run(tmp_path / "plain", tiny_run(tmp_path, train__steps=4, ranks=2, parallel__zero=3,
                                                       output=str(tmp_path / "plain/out")))  # fmt: skip
    assert cli.train(plain)[0] == 0
    assert cli.losses(output) == cli.losses(tmp_path / "plain/out")


def test_a_step_that_is_none(tmp_path: Path) -> None:
    file = cli.write_run(tmp_path, tiny_run(tmp_path))
    code, _, err = cli.train(file, "--profile", "soon")
    assert code == 2 and "log.profile" in err and "Traceback" not in err


def test_a_step_that_never_comes(tmp_path: Path) -> None:
    run = SimpleNamespace(log=SimpleNamespace(profile=(2, 99)))
    job: Any = SimpleNamespace(run=run, output=tmp_path)
    profiling = Profiling(job, None, 4)  # type: ignore[arg-type]
    assert profiling.take_notes() == ["not profiled, since the run ends after 4 steps: 99 (advanced.log.profile)"]
    assert profiling.take_notes() == []
