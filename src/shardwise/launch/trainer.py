"""The library's main entry point: describe a run, fit it, get a model folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from shardwise.config.load import load_run
from shardwise.config.resolve import world_size
from shardwise.config.schema import Run
from shardwise.core.errors import Interrupted, OutOfMemory, RunFailed, UserError
from shardwise.data.mixing import all_names
from shardwise.foresight.plan.needs_prediction import worth_predicting
from shardwise.foresight.prepare import prepare_run
from shardwise.nn.models.source import ModelSource
from shardwise.observe.tokenising import TokenisingProgress
from shardwise.resolved_run import ResolvedRun
from shardwise.train.result import Result

if TYPE_CHECKING:
    from shardwise.foresight.plan.gate import Prediction
    from shardwise.nn.adapters.apply import Adapted


class Trainer:
    """Trains the run it is given: `Trainer("run.yaml").fit()`.

    `run` is a path, a dict, or a Run; overrides are "key.path=value". Ranks are started as the run says, also from a
    notebook; under torchrun the current process is one of them. With `force`, a run predicted to exceed memory is
    started anyway.
    """

    def __init__(self, run: str | Path | dict[str, Any] | Run, *overrides: str, force: bool = False) -> None:
        self.loaded = load_run(run, overrides)
        self.prediction: Prediction | None = None
        self._force = force
        self._resolved: ResolvedRun | None = None
        self._folder = _FolderLock(Path(self.loaded.run.output).expanduser())

    def prepare(self, say: Callable[[str], None] = lambda _: None) -> ResolvedRun:
        """Validates the run and prepares model and data, without starting a process.

        An existing output folder is locked from here on, to the end of `fit`.
        """
        if self._resolved is None:
            for note in self.loaded.notes:
                say(note)
            if self._folder.path.is_dir():  # a new one is made by fit: a mistake leaves no folder behind
                self._folder.claim()
            from shardwise.foresight.rehearse.subprocess import end_helper, ready_helper

            try:
                if self.loaded.run.device != "cpu" and os.environ.get("RANK", "0") == "0":
                    ready_helper()  # it imports while the data are read
                with TokenisingProgress(all_names(self.loaded.run.data)) as bars:
                    progress = bars.update if os.environ.get("RANK", "0") == "0" else None
                    self._resolved = prepare_run(self.loaded, say, progress, partial(self._gate, say))
                if self._resolved.run.parallel.uses_model_parallelism and int(os.environ.get("LOCAL_RANK", 0)) == 0:
                    from shardwise.train.trial.check import check_run_axes

                    check_run_axes(self._resolved, say)
            except BaseException:
                self._folder.release()
                raise
            finally:
                end_helper()
        return self._resolved

    def _gate(self, say: Callable[[str], None], source: ModelSource, run: Run, adapted: Adapted) -> Run:
        """Predicts memory and speed, once it is known what will be trained; raises if the run does not fit."""
        ranks = world_size(run)
        smaller = self.loaded.run.train.micro_batch_size == "auto"
        if worth_predicting(run, ranks, adapted.trainable, adapted.frozen_bytes):
            from shardwise.foresight.plan.gate import check_fits

            self.prediction, run = check_fits(source, run, ranks, self._force, smaller, say)
        return run

    def fit(self, say: Callable[[str], None] = lambda _: None) -> Result:
        """Trains to the end and returns the result; raises if the run fails or is stopped."""
        resolved = self.prepare(say)
        self._folder.claim()
        if self.prediction is not None:
            from shardwise.foresight.plan.gate import save_prediction

            save_prediction(self.prediction, resolved.output)
        try:
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                self._fit_this_rank(resolved, say)
            else:
                from shardwise.launch.local import launch

                launch(resolved)
            return self._result(resolved)
        except OutOfMemory as error:
            from shardwise.foresight.plan.gate import after_shortage

            raise RunFailed(after_shortage(str(error), resolved.source, resolved.run, self.prediction)) from None
        finally:
            self._folder.release()

    def _fit_this_rank(self, resolved: ResolvedRun, say: Callable[[str], None]) -> None:
        from shardwise.core.cpu_probe import cpu_env
        from shardwise.launch.worker import run_rank
        from shardwise.train.status import Status, logs_of

        if resolved.run.device == "cpu":
            os.environ.update(cpu_env(resolved.run.precision))  # oneDNN reads it at its first use
        logs = logs_of(resolved.output)
        logs.mkdir(parents=True, exist_ok=True)
        outcome = run_rank(resolved, Status(logs / f"rank-{os.environ['RANK']}.status"), say)
        if outcome.stopped_by:
            raise Interrupted(
                f"stopped at step {outcome.step}; the same command goes on from there", 128 + outcome.stopped_by
            )

    def _result(self, resolved: ResolvedRun) -> Result:
        from shardwise.observe.metrics import read_metrics

        summary = json.loads((resolved.output / "result.json").read_text())
        return Result(
            summary["step"],
            summary["loss"],
            summary["eval_loss"],
            Path(summary["model"]),
            read_metrics(resolved.output / "metrics.jsonl"),
            summary.get("check"),
            summary.get("exported"),
            summary.get("foresight"),
            tuple(summary.get("notes") or ()),
        )


class _FolderLock:
    """Lock on the output folder: two runs in one folder would overwrite each other's metrics and checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock", timeout=0, thread_local=False)

    def claim(self) -> None:
        """Locks the folder, creating it if needed; does nothing if already locked by us, or on ranks other than 0."""
        if self._lock.is_locked or int(os.environ.get("RANK", 0)) != 0:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            remedy = "wait for it to end, or choose another output folder"
            raise UserError("output", str(self.path), "another run is using this folder", remedy) from None
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error})"
            raise UserError("output", str(self.path), problem, "choose a folder you may write to") from None

    def release(self) -> None:
        """Releases the lock."""
        self._lock.release(force=True)
