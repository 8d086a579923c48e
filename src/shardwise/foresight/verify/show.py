"""Terminal output of `shardwise verify`: progress while claims are tried, then the certificate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.core.errors import Interrupted
from shardwise.foresight.verify.certificate import ClaimRow, print_certificate, write_certificate
from shardwise.foresight.verify.command import VerifyOptions, verify
from shardwise.observe.progress import _mode


def show(
    run_file: Path,
    overrides: list[str],
    full: bool,
    layers: int | None,
    precision: bool,
    output: Path | None,
    keep: Path | None,
    as_json: bool,
) -> int:
    """Verifies, prints the certificate, and returns the exit code."""
    try:
        with _Progress() as progress:
            certificate = verify(
                run_file, overrides, VerifyOptions(full, layers, precision, keep), progress.say, progress.shown
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Interrupted("stopped: nothing was certified", 130) from None
    if output is not None:
        write_certificate(certificate, output)
    if as_json:
        print(json.dumps(certificate.to_json(), indent=1, ensure_ascii=False))
    else:
        # A log has no width of its own: rows are not to be folded there.
        print_certificate(certificate, Console(width=None if sys.stdout.isatty() else 120))
        failure = certificate.failure
        if failure is not None:
            print(f"FAILED: {failure.claim.name}: {failure.why}")
        else:
            compared = sum(row.difference is not None for row in certificate.rows)
            summary = f"{compared} claims shown" if compared else "NOTHING SHOWN: there is no claim of this run to try"
            print(summary + (f"; written to {output}" if output is not None else ""))
    return 0 if certificate.passed else 1


class _Progress:
    """Progress on standard error: a live line on a terminal, one line per claim in a log."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
        self._mode = _mode(self._console)
        self._status: Any = None

    def __enter__(self) -> _Progress:
        if self._mode == "live":
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Shows what is being done."""
        if self._status is not None:
            self._status.update(text)
        elif self._mode == "plain":
            print(f"  {text}", file=sys.stderr, flush=True)

    def shown(self, row: ClaimRow) -> None:
        """Shows the verdict on a claim."""
        if self._mode != "off":
            self._console.print(
                f"  {row.verdict:9} {row.claim.name} ({row.seconds:.1f} s)", highlight=False, markup=False
            )  # fmt: skip
