"""The library's front door: describe a run, fit it, get a folder."""

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
from shardwise.foresight.plan.worth import worth_predicting
from shardwise.foresight.prepare import prepare_run
from shardwise.nn.models.source import ModelSource
from shardwise.observe.tokenising import TokenisingProgress
from shardwise.resolved_run import ResolvedRun
from shardwise.train.result import Result

if TYPE_CHECKING:
    from shardwise.foresight.plan.gate import Prediction
    from shardwise.nn.adapters.apply import Adapted


class Trainer:
    """Trains what a run describes: `Trainer("run.yaml").fit()`.

    `run` is a path, a dict, or a Run; overrides are "key.path=value". Ranks are started as the run says, also from a
    notebook; under torchrun the current process is one of them. With `force`, a run that is not foreseen to fit is
    tried all the same.
    """

    def __init__(self, run: str | Path | dict[str, Any] | Run, *overrides: str, force: bool = False) -> None:
        self.loaded = load_run(run, overrides)
        self.prediction: Prediction | None = None
        self._force = force
        self._job: ResolvedRun | None = None
        self._folder = _SoleUser(Path(self.loaded.run.output).expanduser())

    def prepare(self, say: Callable[[str], None] = lambda _: None) -> ResolvedRun:
        """Checks everything and readies model and data, without starting a process.

        An output folder that is there already is held from here on, to the end of `fit`.
        """
        if self._job is None:
            if self._folder.path.is_dir():  # a new one is made by fit: a mistake leaves no folder behind
                self._folder.claim()
            from shardwise.foresight.rehearse.subprocess import end_helper, ready_helper

            try:
                if self.loaded.run.device != "cpu" and os.environ.get("RANK", "0") == "0":
                    ready_helper()  # it imports while the data are read
                with TokenisingProgress(all_names(self.loaded.run.data)) as bars:
                    tell = bars.update if os.environ.get("RANK", "0") == "0" else None
                    self._job = prepare_run(self.loaded, say, tell, partial(self._gate, say))
                if self._job.run.parallel.beyond_data and int(os.environ.get("LOCAL_RANK", 0)) == 0:
                    from shardwise.train.trial.check import check_axes

                    router: Any = self._job.run.router
                    coefficients = (router.aux_loss, router.z_loss)
                    check_axes(self._job.source, self._job.run.parallel, say, coefficients)
            except BaseException:
                self._folder.release()
                raise
            finally:
                end_helper()
        return self._job

    def _gate(self, say: Callable[[str], None], source: ModelSource, run: Run, adapted: Adapted) -> Run:
        """Predicts the run, once it is known what will be trained."""
        ranks, smaller = world_size(run), self.loaded.run.train.micro_batch_size == "auto"
        if worth_predicting(run, ranks, adapted.trainable, adapted.frozen_bytes):
            from shardwise.foresight.plan.gate import check_fits

            self.prediction, run = check_fits(source, run, ranks, self._force, smaller, say)
        return run

    def fit(self, say: Callable[[str], None] = lambda _: None) -> Result:
        """Trains to the end and returns where the model lies; raises if the run fails or is stopped."""
        job = self.prepare(say)
        self._folder.claim()
        if self.prediction is not None:
            from shardwise.foresight.plan.gate import save_prediction

            save_prediction(self.prediction, job.output)
        try:
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                self._fit_here(job, say)
            else:
                from shardwise.launch.local import launch

                launch(job)
            return self._result(job)
        except OutOfMemory as error:
            from shardwise.foresight.plan.gate import after_shortage

            raise RunFailed(after_shortage(str(error), job.source, job.run, self.prediction)) from None
        finally:
            self._folder.release()

    def _fit_here(self, job: ResolvedRun, say: Callable[[str], None]) -> None:
        from shardwise.core.cpu_probe import cpu_env
        from shardwise.launch.worker import run_rank
        from shardwise.train.status import Status, logs_of

        if job.run.device == "cpu":
            os.environ.update(cpu_env(job.run.precision))  # oneDNN reads it at its first use
        logs = logs_of(job.output)
        logs.mkdir(parents=True, exist_ok=True)
        outcome = run_rank(job, Status(logs / f"rank-{os.environ['RANK']}.status"), say)
        if outcome.stopped_by:
            raise Interrupted(
                f"stopped at step {outcome.step}; the same command goes on from there", 128 + outcome.stopped_by
            )

    def _result(self, job: ResolvedRun) -> Result:
        from shardwise.observe.metrics import read_metrics

        summary = json.loads((job.output / "result.json").read_text())
        return Result(
            summary["step"],
            summary["loss"],
            summary["eval_loss"],
            Path(summary["model"]),
            read_metrics(job.output / "metrics.jsonl"),
            summary.get("check"),
            summary.get("exported"),
            summary.get("foresight"),
            tuple(summary.get("notes") or ()),
        )


class _SoleUser:
    """Two runs in one folder would overwrite each other's metrics and checkpoints: the second is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock", timeout=0, thread_local=False)

    def claim(self) -> None:
        """Takes the folder, making it if need be; does nothing if it is ours already, or for ranks beside the first."""
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
        """Lets others have it."""
        self._lock.release(force=True)
