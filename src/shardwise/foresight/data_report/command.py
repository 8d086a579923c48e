"""`shardwise data`: the bill of a run's data and a preview of its examples, before anything is trained."""

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
    """Prints the bill (or its JSON) and writes the page; returns the exit code, 2 if the data would fail the run."""
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal cannot encode must not end the command
        with contextlib.suppress(AttributeError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    errors, console = Console(stderr=True), Console()
    if html is not None and html.is_dir():
        raise UserError("--html", str(html), "is a folder", "name a file, e.g. data.html")
    try:
        with TokenisingProgress(all_names(run.data)) as bars:
            say = lambda text: errors.print(f"  {text}", style="dim", markup=False, highlight=False)  # noqa: E731
            found = survey(run, say, bars.update)
    except Problems as failed:
        print_problems(failed.errors, errors)
        if as_json:
            print_failure(failed.errors)
        return UserError.exit_code
    except KeyboardInterrupt:
        raise Interrupted("stopped; what was tokenised so far is kept, and gone on from", 130) from None
    bill = bill_of(found)
    wrong, odd = problems(bill), warnings(bill)
    samples = _samples(found, rows, places)
    if html is not None:
        try:
            write_page(html, f"Data of {title}", bill, samples, found.tokenizer, odd, wrong)
        except OSError as error:
            raise UserError("--html", str(html), f"cannot be written ({error.strerror})", "choose another") from None
    if as_json:
        _print_json(bill.to_json(), odd, wrong)
        print_problems(wrong, errors)
    else:
        _print(found, bill, samples, odd, console, bool(places))
        print_problems(wrong, errors)
    if html is not None:
        errors.print(f"the page lies in {html}", markup=False, highlight=False, soft_wrap=True)
    return UserError.exit_code if wrong else 0


def print_failure(wrong: list[UserError]) -> None:
    """The JSON of data of which there is no bill."""
    _print_json({"version": VERSION, "train": [], "eval": []}, [], wrong)


def _samples(found: Survey, rows: int, places: list[str]) -> list[Sample]:
    if places:
        return [sample_at(found, place) for place in places]
    return samples_of(found, rows) if rows else []


def _print(
    found: Survey, bill: DataStatistics, samples: list[Sample], odd: list[Notice], console: Console, particular: bool
) -> None:
    if samples:
        Preview(found.tokenizer, console, WHOLE if particular else MOST_TOKENS).print(samples)
        console.print()
    print_bill(bill, console)
    if odd:
        console.print()
    print_notices(odd, console)


def _print_json(values: dict[str, Any], odd: list[Notice], wrong: list[UserError]) -> None:
    """ASCII: whatever the data hold, nothing of it acts on a terminal."""
    values["warnings"] = [notice.to_json() for notice in odd]
    values["problems"] = [{"field": e.field, "value": e.value, "problem": e.problem, "remedy": e.remedy} for e in wrong]
    print(json.dumps(values, indent=1, default=str))
