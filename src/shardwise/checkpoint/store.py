"""Saves and loads the state of a run: distributed, in the background, atomic, verified.

A checkpoint is one folder, `step-00000100`:
  state/          tensors, written by PyTorch's distributed checkpoint; loads on any number of ranks and any ZeRO stage
  model/          config, tokenizer and generation settings of the Hugging Face model
  trainer.json    step, data position, loss scale, best evaluation
  run.json        the resolved config
  manifest.json   size and hash of all the above (integrity.py)
It is written under a hidden name and renamed when every rank is done, so a crash at any byte leaves the previous one
intact.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from shardwise.checkpoint.folders import list_checkpoints, step_folder
from shardwise.checkpoint.integrity import (
    MANIFEST,
    Damage,
    digest_file,
    sync_folder,
    verify,
    write_manifest,
)
from shardwise.checkpoint.writing import Pending, StateWriter
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.safe_pickle import SafeReader, global_in
from shardwise.distributed.lazy_rows import LoadRows, split_rows

STATE, MODEL, TRAINER, RUN = "state", "model", "trainer.json", "run.json"


def set_aside(output: Path) -> None:
    """Renames the checkpoints and metrics of an earlier run in this folder together, so that no run is a mix."""
    if not list_checkpoints(output / "checkpoints"):
        return
    number = 1
    while (output / f"checkpoints.{number}").exists():
        number += 1
    (output / "checkpoints").rename(output / f"checkpoints.{number}")
    if (output / "metrics.jsonl").exists():
        (output / "metrics.jsonl").rename(output / f"metrics.{number}.jsonl")


class SaveFailed(RunFailed):
    """A checkpoint that could not be written, and the rank that failed."""

    def __init__(self, failure: BaseException, rank: int) -> None:
        self.rank, reason = _failed_rank(failure, rank)
        full = isinstance(reason, OSError) and reason.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "\n  → free some space first, or lower checkpoint.keep: as it is the next start is refused" * full
        super().__init__(f"a checkpoint could not be written ({type(reason).__name__}: {reason}){remedy}")


def _failed_rank(failure: BaseException, rank: int) -> tuple[int, BaseException]:
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, (failure, _) = next(iter(failure.failures.items()))
    return rank, failure


def failure_words(failure: BaseException) -> str:
    """Returns what went wrong with a save, in one line."""
    reason = _failed_rank(failure, 0)[1]
    return str(reason).splitlines()[0] if isinstance(reason, RunFailed) else f"{type(reason).__name__}: {reason}"


class CheckpointStore:
    """The checkpoints of one run, written one at a time."""

    def __init__(self, root: Path, keep: int, background: bool, group: dist.ProcessGroup) -> None:
        self.root = root
        self.keep = keep
        self.background = background
        self.group = group
        self.is_main = dist.get_rank(group) == 0
        self._worker: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._model: dict[str, tuple[bytes, tuple[int, str]]] | None = None
        self._writer = StateWriter(group, durable=True, background=background)
        if self.is_main:
            root.mkdir(parents=True, exist_ok=True)
            for left_over in root.glob(".step-*"):
                shutil.rmtree(left_over, ignore_errors=True)
        dist.barrier(group=group)

    def save(
        self,
        step: int,
        tensors: dict[str, Any],
        trainer: dict[str, Any],
        run_json: str,
        write_model: Callable[[Path], None],
        best_step: int | None,
    ) -> None:
        """Stages the state and returns; the files appear in the background. Waits for an earlier save first.

        On a GPU the copy is still in flight then: see `settle`.
        """
        self.wait()
        if self.is_main and self._model is None:
            self._model = _files_written_by(write_model)
        small = {TRAINER: json.dumps(trainer, indent=1).encode(), RUN: run_json.encode()}
        pending = self._writer.begin(tensors)
        args = (step, pending, small, best_step)
        if not pending.staged:
            self._finish(*args)
            self.wait()
            return
        self._worker = threading.Thread(target=self._finish, args=args, name=f"checkpoint-{step}", daemon=True)
        self._worker.start()

    def settle(self) -> None:
        """Call before anything that was saved is changed: the device then waits for the copy, the host does not."""
        self._writer.settle()

    def notes(self) -> list[str]:
        """Returns this rank's notes, each once."""
        return self._writer.notes()

    def raise_if_failed(self) -> None:
        """Raises at once if the save in the background has failed, rather than at the next one; never waits."""
        if self._failure is not None:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is complete on every rank; raises if it failed."""
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise SaveFailed(failure, dist.get_rank(self.group)) from failure

    def _finish(self, step: int, pending: Pending, small: dict[str, bytes], best_step: int | None) -> None:
        partial = self.root / f".step-{step:08d}"
        try:
            if self.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / STATE).mkdir(parents=True)
            dist.barrier(group=self.group)
            written = pending.write(partial / STATE)
            if self.is_main:
                files = {f"{STATE}/{name}": entry for part in written for name, entry in part.items()}
                files |= self._write_small(partial, small)
                files[f"{STATE}/.metadata"] = digest_file(partial / STATE / ".metadata")
                write_manifest(partial, files)
                target = step_folder(self.root, step)
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
                sync_folder(self.root)
                self._prune(target, best_step)
            dist.barrier(group=self.group)
        except BaseException as failure:  # DCP's own exception derives from BaseException
            if self.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # where the disk is full it is in the way
            self._failure = failure

    def _write_small(self, partial: Path, small: dict[str, bytes]) -> dict[str, tuple[int, str]]:
        """The files beside the tensors. A tokenizer is slow to write and to hash, and does not change."""
        (partial / MODEL).mkdir()
        for name, content in small.items():
            (partial / name).write_bytes(content)
        files = {name: digest_file(partial / name) for name in small}
        for name, (content, digest) in (self._model or {}).items():
            file = partial / MODEL / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            files[f"{MODEL}/{name}"] = digest
        return files

    def _prune(self, newest: Path, best_step: int | None) -> None:
        # Later steps are of a run that was given up, by resume=never or by going back to an earlier checkpoint.
        kept_folders = set([p for p in list_checkpoints(self.root) if p <= newest][-self.keep :])
        if best_step is not None:
            kept_folders.add(step_folder(self.root, best_step))
        for folder in list_checkpoints(self.root):
            if folder not in kept_folders:
                shutil.rmtree(folder, ignore_errors=True)


def _files_written_by(write: Callable[[Path], None]) -> dict[str, tuple[bytes, tuple[int, str]]]:
    """The files that a function writes into a folder: by name the content, with its size and hash."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        files = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): (file.read_bytes(), digest_file(file)) for file in files}


def _detached(tensors: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}


def choose_checkpoint(resume: str, root: Path) -> Path | None:
    """Returns the checkpoint to resume from, or None to start afresh; contents are checked by `check_whole`."""
    if resume == "never":
        return None
    if resume == "auto":
        checkpoints = list_checkpoints(root)
        return checkpoints[-1] if checkpoints else None
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise UserError(
            "resume",
            resume,
            "there is no such checkpoint",
            f"use auto, never, or one of {_names(list_checkpoints(root))}",
        )
    if not (path / MANIFEST).is_file():
        inner = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
        if inner:
            return inner[-1]
        raise UserError(
            "resume", resume, f"is no checkpoint (it has no {MANIFEST})", f"use one of {_names(list_checkpoints(root))}"
        )
    return path


def check_whole(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Verifies every file, divided over the ranks; raises UserError with the damage and an intact checkpoint."""
    if damage := damage_in(folder, group):
        others = [p for p in reversed(list_checkpoints(folder.parent)) if p != folder]
        ordered = sorted(others, key=lambda p: p > folder)  # those before it first, of them the newest
        raise refusal(folder, damage, next((p for p in ordered if not verify(p)), None))


def damage_in(folder: Path, group: dist.ProcessGroup | None = None) -> list[Damage]:
    """Returns all damage in a checkpoint, on every rank; the ranks divide the work."""
    share, shares = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    own_damage = verify(folder, share, shares)
    parts: list[Any] = [own_damage]
    if group is not None and shares > 1:
        parts = [None] * shares
        dist.all_gather_object(parts, own_damage, group=group)
    return list(dict.fromkeys(damage for part in parts for damage in part))  # a bad manifest is found by each rank


def refusal(folder: Path, damage: list[Damage], good: Path | None) -> UserError:
    """Returns the error for a damaged checkpoint, with an intact one to use instead."""
    remedy = (
        f"the {'previous' if good < folder else 'next'} good one is {good} (for a run to go on from it: resume={good})"
        if good
        else "no good one is left beside it: a run can start afresh with resume=never, which keeps these files aside"
    )
    return UserError("checkpoint", str(folder), f"{in_words(damage)}; it was not loaded", remedy)


def in_words(damage: list[Damage]) -> str:
    """Describes the first damaged file, and how many others there are."""
    others = len(damage) - 1
    return f"{damage[0]}" + (f" (and {others} more file{'s' * (others > 1)})" if others else "")


def _names(folders: list[Path]) -> str:
    return ", ".join(str(f) for f in folders) or "(none here)"


def load_tensors(
    folder: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None, reader: SafeReader | None = None
) -> None:
    """Fills tensors in place from a verified checkpoint; sharding may differ from when it was saved."""
    if reader is None:
        reader = SafeReader(folder / STATE)
        reader.read_metadata()  # refuses in its own words; PyTorch would wrap them in a trace, and try other files
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant without a group
            plain_tensors, rows = split_rows(_detached(tensors))
            load(
                plain_tensors, storage_reader=reader, planner=LoadRows(rows), process_group=group, no_dist=group is None
            )
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0] if error.failures else error
        if isinstance(reason, UserError | RunFailed):  # the reader's own words (safe_pickle.py, copies.py)
            raise reason from None
        if (name := global_in(reason)) is not None:
            problem = f"holds what could run code when it is read ({name}); it was not loaded, nothing in it was run"
            remedy = "use a checkpoint that you trust, of Shardwise"
            raise UserError("checkpoint", str(folder), problem, remedy) from None
        print(error, file=sys.stderr)
        raise UserError("resume", str(folder), f"does not fit this model ({str(reason).splitlines()[0]})",
                        "use the model it was saved from, or start afresh with resume=never") from None  # fmt: skip


def read_trainer(folder: Path) -> dict[str, Any]:
    """Returns trainer.json: step, data position and the rest."""
    return dict(json.loads((folder / TRAINER).read_text()))


def check_same_data(folder: Path, fingerprint: str) -> None:
    """Raises an error if the data changed: a position in the data means nothing in other data."""
    if read_trainer(folder).get("data_fingerprint") != fingerprint:
        problem = "was saved while training on other data (or data settings), so its place in them means nothing"
        remedy = "bring the data back, choose another output folder, or start afresh with resume=never"
        raise UserError("resume", str(folder), problem, remedy)
