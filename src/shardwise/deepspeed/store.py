"""Checkpoints in DeepSpeed's layout: a folder per tag, and a file `latest` that names the newest tag.

A tag's folder contains a checkpoint of our own store (`step-…`): written atomically, hashed, loadable on any number of
ranks and at any stage. An existing tag is replaced once the new one is complete. The script's data (`client_state`) and
the scheduler's state are stored beside it and read with torch's weights_only: numbers, text, lists, dicts and tensors;
other classes only if the script allows them with torch.serialization.add_safe_globals.
"""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.store import MODEL, STATE, CheckpointStore, check_whole, load_tensors, read_trainer
from shardwise.core.errors import UserError
from shardwise.core.safe_pickle import SafeReader, global_in
from shardwise.train.engine import Engine
from shardwise.train.state import prime_optimizer

LATEST, EXTRA, PREFIX = "latest", "deepspeed.pt", "model."
logger = logging.getLogger("shardwise.deepspeed")


def save(engine: Engine, root: Path, tag: str, extra: dict[str, Any], latest: bool, without_frozen: bool) -> Path:
    """Writes the checkpoint of a tag, on all ranks; `latest` is updated once it is complete."""
    _check_tag(tag, engine)
    _check_folder(root, tag, engine)
    engine.sharded.reshard()  # an evaluation at stages 0 to 2 leaves gathered copies in the model
    frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
    left_out = {PREFIX + name for name in frozen} if without_frozen else set()
    tensors = {name: value for name, value in engine.tensors().items() if name not in left_out}
    store = CheckpointStore(root / tag, keep=1, background=False, group=engine.world.checkpoint)
    trainer = {"updates": engine.updates, "scaler": engine.scaler.state_dict(), "extra": {}, "frozen": frozen}
    config = engine.config.model_dump_json()
    store.save(engine.updates, tensors, trainer, config, lambda folder: torch.save(extra, folder / EXTRA), None)
    engine.sharded.saved()
    if latest and engine.world.is_main:
        partial = root / f".{LATEST}"
        partial.write_text(tag)
        partial.rename(root / LATEST)
    dist.barrier(group=engine.world.control)
    return root / tag


def find(root: Path, tag: str | None) -> Path | None:
    """The checkpoint of a tag, or of the newest; None if there is none."""
    if tag is None:
        if not (root / LATEST).is_file():
            logger.warning(
                "%s is missing: no checkpoint was loaded (give a tag to load one all the same)", root / LATEST
            )
            return None
        tag = (root / LATEST).read_text().strip()
    if not (root / str(tag)).resolve().is_relative_to(root.resolve()):
        raise UserError("tag", str(tag), f"leads out of {root}", "give the name of a folder in it")
    checkpoints = list_checkpoints(root / str(tag))
    if not checkpoints:
        hint = " (it was written by DeepSpeed itself)" if list((root / str(tag)).glob("*_states.pt")) else ""
        logger.warning("%s holds no checkpoint%s: none was loaded", root / str(tag), hint)
        return None
    return checkpoints[-1]


def load(engine: Engine, folder: Path, strict: bool, optimizer: bool) -> dict[str, Any]:
    """Loads a checkpoint into the engine, on all ranks; returns what was saved besides the tensors."""
    check_whole(folder, engine.world.control)
    engine.sharded.reshard()
    trainer = read_trainer(folder)
    if optimizer:
        prime_optimizer(engine.optimizer)
    stored = set(names_in(folder))
    tensors = {k: v for k, v in engine.tensors().items() if optimizer or k.startswith(PREFIX)}
    forgiven = {PREFIX + name for name in trainer["frozen"]} - stored  # saved without them, on purpose
    lacking = [k for k in tensors if k not in stored and k not in forgiven]
    if lacking and strict:
        problem = f"does not hold {lacking[0]}" + (f" and {len(lacking) - 1} more" if lacking[1:] else "")
        raise UserError("load_dir", str(folder), problem, "load it into the model and optimizer it was saved from")
    load_tensors(folder, {k: v for k, v in tensors.items() if k in stored}, engine.world.checkpoint)
    if optimizer:
        engine.updates = int(trainer["updates"])
        if trainer["scaler"]:
            engine.scaler.load_state_dict(trainer["scaler"])
    try:
        extra = torch.load(folder / MODEL / EXTRA, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = global_in(error) or str(error).splitlines()[0][:80]
        problem = f"client_state holds what could run code when it is read ({culprit})"
        remedy = "if you trust it, allow its class with torch.serialization.add_safe_globals before load_checkpoint"
        raise UserError("load_dir", str(folder), problem, remedy) from None
    assert isinstance(extra, dict)
    return extra


def names_in(folder: Path) -> dict[str, Any]:
    """Description of each tensor of a checkpoint, by name."""
    return dict(SafeReader(folder / STATE).read_metadata().state_dict_metadata)


def _check_folder(root: Path, tag: str, engine: Engine) -> None:
    """Checks on all ranks together that the folder exists or can be created, so that none waits for the others."""
    trouble: list[str | None] = [None]
    if engine.world.is_main:
        try:
            (root / tag).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            trouble = [error.strerror or str(error)]
    dist.broadcast_object_list(trouble, 0, group=engine.world.control)
    if trouble[0] is not None:
        raise UserError("save_dir", str(root), f"cannot be made ({trouble[0]})", "give a folder that you may write to")


def _check_tag(tag: str, engine: Engine) -> None:
    """Checks that all ranks use the same tag."""
    tags: list[Any] = [None] * engine.world.size
    dist.all_gather_object(tags, tag, group=engine.world.control)
    if len(set(tags)) > 1:
        raise UserError("tag", tag, f"differs between ranks ({json.dumps(sorted(set(tags)))})", "give all the same")
    if not tag or tag in (LATEST, ".", "..") or "/" in tag:
        raise UserError("tag", tag, "cannot be the name of a folder", "use e.g. global_step100")
