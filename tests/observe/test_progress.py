"""The progress line: plain text where nobody can see it move, calm and narrow enough where somebody can."""

from __future__ import annotations

import io
import itertools
import re
import sys
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from shardwise.core.errors import UserError
from shardwise.observe.progress import Progress

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SHOW_CURSOR, _HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "SHARDWISE_PROGRESS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def _record(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "train",
        "step": step,
        "loss": 2.1034,
        "learning_rate": 1e-4,
        "grad_norm": 0.912,
        "tokens": 4096,
        "tokens_per_second": 12345.0,
        "mfu": 0.381,
        "memory_bytes": 13207024435,
        "elapsed_seconds": 754.0,
        "eta_seconds": 3725.0,
    }
    return record | changes


def _terminal(width: int = 80, **options: Any) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(force_terminal=True, width=width, file=file, **options), file


def _pipe() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80), file


def _drawn(file: io.StringIO) -> list[str]:
    return [line for line in re.split(r"[\r\n]", _ESCAPE.sub("", file.getvalue())) if line.strip()]


def test_plain_line_holds_every_value_and_no_escape_codes() -> None:
    console, file = _pipe()
    with Progress(100, console=console) as progress:
        progress.update(_record(3))
        told = {"loss": 1.9, "perplexity": 6.6859, "accuracy": 0.78, "time": 1.7e9}
        progress.evaluated({"kind": "eval", "step": 3, **told})
        progress.note("[red]saved[/red] " + "x" * 100)
    assert file.getvalue().splitlines() == [
        "step   3/100  loss 2.1034  lr 1.0e-4  grad 0.91  12.3k tok/s  MFU 38.1%  12.3 GiB  elapsed 12m34s  ETA 1h02m",
        "step 3  evaluation  loss 1.9000  perplexity 6.6859  accuracy 0.7800",
        "[red]saved[/red] " + "x" * 100,
    ]


def test_plain_lines_are_thinned_but_first_and_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.05)  # each look at the clock costs 50 ms
    monkeypatch.setattr("shardwise.observe.progress.time.monotonic", lambda: next(clock))
    console, file = _pipe()
    with Progress(200, console=console) as progress:
        for step in range(1, 201):
            progress.update(_record(step))
    steps = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert steps[0] == 1 and steps[-1] == 200 and steps.count(200) == 1
    assert 8 <= len(steps) <= 13


def test_a_run_that_stops_early_still_tells_its_last_step() -> None:
    console, file = _pipe()
    with pytest.raises(RuntimeError), Progress(100, console=console) as progress:
        for step in (1, 2, 3):
            progress.update(_record(step))
        raise RuntimeError("out of memory")
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["1/100", "3/100"]


def test_missing_values_are_left_out_and_broken_ones_shown() -> None:
    console, file = _pipe()
    with Progress(1, console=console) as progress:
        progress.update({"step": 1, "loss": float("nan"), "mfu": None, "elapsed_seconds": 2.0})
    assert file.getvalue() == "step 1/1  loss nan  elapsed 2s\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_live_lines_never_exceed_the_terminal(width: int) -> None:
    console, file = _terminal(width)
    with Progress(100_000, first_step=7, console=console, refresh=10) as progress:
        for step in (8, 99_999, 100_000):
            progress.update(_record(step, loss=123456.789, grad_norm=1234.5, tokens_per_second=9.99999e8))
            progress.note("saved " + "x" * 150)
    lines = _drawn(file)
    assert max(cell_len(line) for line in lines) <= width
    assert any("100000/100000" in line for line in lines)


def test_live_line_drops_the_least_important_columns_first() -> None:
    def final(width: int) -> str:
        console, file = _terminal(width)
        with Progress(1000, console=console, refresh=10) as progress:
            progress.update(_record(500))
        return _drawn(file)[-1]

    for wanted in ("500/1000", "loss 2.1034", "lr 1.0e-4", "grad 0.91", "12.3k tok/s", "ETA 1h02m", "━", "─"):
        assert wanted in final(80)
    assert "MFU" not in final(80) and "GiB" not in final(80)
    for wanted in ("MFU 38.1%", "12.3 GiB", "elapsed 12m34s"):
        assert wanted in final(140)
    assert "loss 2.1034" in final(30) and "tok/s" not in final(30)


def test_losses_by_source_come_last_and_stay() -> None:
    console, file = _pipe()
    with Progress(2, console=console) as progress:
        progress.update(_record(1, losses={"chat": 1.5, "a-very-long-name-of-code": 2.25}))
        progress.update(_record(2, losses={"chat": 1.4}))  # the other was not in this step
        progress.evaluated({"kind": "eval", "step": 2, "loss": 1.9, "losses": {"chat": 1.8, "code": None}})
    first, second, evaluation = _drawn(file)
    assert first.endswith("ETA 1h02m  chat 1.5000  name-of-code 2.2500")
    assert second.endswith("chat 1.4000  name-of-code 2.2500")
    assert evaluation == "step 2  evaluation  loss 1.9000  (chat 1.8000, code -)"
    console, file = _terminal(80)
    with Progress(2, console=console, refresh=10) as progress:
        progress.update(_record(1, losses={"chat": 1.5, "code": 2.25}))
    assert "chat" not in _drawn(file)[-1], "the first to go on a narrow terminal"


def test_columns_do_not_move_when_values_change() -> None:
    console, file = _terminal(120)
    with Progress(1000, console=console, refresh=10) as progress:
        for step, loss in ((9, 2.1), (10, 12.345), (999, 0.0123), (1000, float("nan"))):
            progress.update(_record(step, loss=loss, mfu=None if step == 999 else 0.4))
            progress.note(".")
    places = {line.index("tok/s") for line in _drawn(file) if "tok/s" in line}
    assert len(places) == 1


def test_loss_is_green_below_its_running_mean_and_yellow_above() -> None:
    console, file = _terminal(80, color_system="standard")
    with Progress(10, console=console, refresh=10) as progress:
        for step, loss in ((1, 3.0), (2, 2.0), (3, 4.0), (4, float("inf"))):
            progress.update(_record(step, loss=loss))
            progress.note(".")
    text = file.getvalue()
    assert "\x1b[32m2.0000" in text and "\x1b[33m4.0000" in text and "\x1b[1;31minf" in text
    assert "\x1b[32m3.0000" not in text and "\x1b[33m3.0000" not in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console, file = _terminal()
    with Progress(10, console=console, refresh=10) as progress:
        progress.update(_record(1))
        progress.update(_record(2, loss=1.0))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7][0-9;]*m", file.getvalue())


def test_exception_restores_cursor_and_streams() -> None:
    console, file = _terminal()
    before = sys.stdout, sys.stderr
    with pytest.raises(RuntimeError), Progress(10, console=console) as progress:
        assert file.getvalue().count(_HIDE_CURSOR) == 1
        assert _SHOW_CURSOR not in file.getvalue()
        progress.update(_record(1))
        raise RuntimeError
    assert file.getvalue().rstrip("\n").endswith(_SHOW_CURSOR)
    assert (sys.stdout, sys.stderr) == before


def test_evaluation_and_notes_stand_above_the_live_line() -> None:
    console, file = _terminal()
    with Progress(10, console=console, refresh=10) as progress:
        progress.update(_record(1))
        progress.evaluated({"kind": "eval", "step": 1, "loss": 1.9, "perplexity": 6.7})
        progress.note("checkpoint saved")
    lines = _drawn(file)
    assert lines.index("step 1  evaluation  loss 1.9000  perplexity 6.7000") < lines.index("checkpoint saved")
    assert "1/10" in lines[-1]


def test_dumb_terminals_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for forced in ("", "live"):
        monkeypatch.setenv("SHARDWISE_PROGRESS", forced)
        console, file = _terminal()
        with Progress(10, console=console) as progress:
            progress.update(_record(1))
        assert file.getvalue().startswith("step  1/10") and "\x1b" not in file.getvalue()


def test_the_environment_forces_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def output(mode: str, console: Console, file: io.StringIO) -> str:
        monkeypatch.setenv("SHARDWISE_PROGRESS", mode)
        with Progress(10, console=console) as progress:
            progress.update(_record(10))
            progress.note("note")
        return file.getvalue()

    assert output("plain", *_terminal()).startswith("step 10/10") and "\x1b" not in output("plain", *_terminal())
    assert _HIDE_CURSOR in output("live", *_pipe())
    assert output("off", *_terminal()) == ""
    with pytest.raises(UserError, match="SHARDWISE_PROGRESS"):
        output("loud", *_pipe())


def test_forced_colour_does_not_make_a_log_file_live(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(10) as progress:
        progress.update(_record(1))
    out = capsys.readouterr().out
    assert out.startswith("step  1/10") and "\x1b" not in out
