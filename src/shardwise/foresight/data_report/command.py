"""`shardwise data`: reports statistics of a run's data and previews examples, before anything is trained."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.config.schema import Run
from shardwise.core.errors import Interrupted, UserError
from shardwise.data.mixing import all_names
from shardwise.data.statistics import VERSION, DataStatistics
from shardwise.foresight.data_report.advice import Notice, problems, warnings
from shardwise.foresight.data_report.page import write_page
from shardwise.foresight.data_report.preview import MOST_TOKENS, Preview, Sample
from shardwise.foresight.data_report.survey import Problems, Survey, bill_of, sample_at, samples_of, survey
from shardwise.foresight.data_report.table import print_bill, print_notices, print_problems
from shardwise.observe.tokenising import TokenisingProgress

WHOLE = 8192  # tokens of a row that was asked for by place


def show_data(run: Run, title: str, rows: int, places: list[str], html: Path | None, as_json: bool) -> int:
    """Prints the report (or its JSON) and writes the page. Returns the exit code, 2 if the data would fail the run."""
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal cannot encode must not end the command
        with contextlib.suppress(AttributeError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    stderr = Console(stderr=True)
    console = Console()
    if html is not None and html.is_dir():
        raise UserError("--html", str(html), "is a folder", "name a file, e.g. data.html")
    try:
        with TokenisingProgress(all_names(run.data)) as bars:
            say = lambda text: stderr.print(f"  {text}", style="dim", markup=False, highlight=False)  # noqa: E731
            surveyed = survey(run, say, bars.update)
    except Problems as failed:
        print_problems(failed.errors, stderr)
        if as_json:
            print_failure(failed.errors)
        return UserError.exit_code
    except KeyboardInterrupt:
        raise Interrupted("stopped; what was tokenised so far is kept, and gone on from", 130) from None
    statistics = bill_of(surveyed)
    errors_found = problems(statistics)
    notices = warnings(statistics)
    samples = _samples(surveyed, rows, places)
    if html is not None:
        try:
            write_page(html, f"Data of {title}", statistics, samples, surveyed.tokenizer, notices, errors_found)
        except OSError as error:
            raise UserError("--html", str(html), f"cannot be written ({error.strerror})", "choose another") from None
    if as_json:
        _print_json(statistics.to_json(), notices, errors_found)
        print_problems(errors_found, stderr)
    else:
        _print(surveyed, statistics, samples, notices, console, bool(places))
        print_problems(errors_found, stderr)
    if html is not None:
        stderr.print(f"the page lies in {html}", markup=False, highlight=False, soft_wrap=True)
    return UserError.exit_code if errors_found else 0


def print_failure(errors: list[UserError]) -> None:
    """Prints the JSON of data that could not be prepared."""
    _print_json({"version": VERSION, "train": [], "eval": []}, [], errors)


def _samples(surveyed: Survey, rows: int, places: list[str]) -> list[Sample]:
    if places:
        return [sample_at(surveyed, place) for place in places]
    return samples_of(surveyed, rows) if rows else []


def _print(
    surveyed: Survey,
    statistics: DataStatistics,
    samples: list[Sample],
    notices: list[Notice],
    console: Console,
    full_rows: bool,
) -> None:
    if samples:
        Preview(surveyed.tokenizer, console, WHOLE if full_rows else MOST_TOKENS).print(samples)
        console.print()
    print_bill(statistics, console)
    if notices:
        console.print()
    print_notices(notices, console)


def _print_json(values: dict[str, Any], notices: list[Notice], errors: list[UserError]) -> None:
    """Prints ASCII only: whatever the data hold, nothing of it acts on a terminal."""
    values["warnings"] = [notice.to_json() for notice in notices]
    values["problems"] = [
        {"field": e.field, "value": e.value, "problem": e.problem, "remedy": e.remedy} for e in errors
    ]
    print(json.dumps(values, indent=1, default=str))
