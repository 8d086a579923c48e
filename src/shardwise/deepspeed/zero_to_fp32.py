"""Converts a checkpoint to one unsharded fp32 state dict: for scripts, and as a program.

python -m shardwise.deepspeed.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] [--safe_serialization]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.store import check_whole, load_tensors, read_trainer
from shardwise.config.units import parse_size
from shardwise.core.errors import UserError
from shardwise.deepspeed.store import LATEST, PREFIX, names_in

NAMES = {True: "model.safetensors", False: "pytorch_model.bin"}


class LazyTensor:
    """A tensor that is read when `contiguous` is called."""

    def __init__(self, folder: Path, name: str, shape: torch.Size) -> None:
        self.folder = folder
        self.name = name
        self.shape = shape

    def contiguous(self) -> torch.Tensor:
        """Reads the tensor to the host."""
        return _read(self.folder, {self.name: self.shape})[self.name]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The model's full fp32 state dict from a `save_checkpoint` folder; needs no other process."""
    folder, shapes = _open(Path(checkpoint_dir), tag, exclude_frozen_parameters)
    if lazy_mode:
        return {name: LazyTensor(folder, name, shape) for name, shape in shapes.items()}
    return dict(_read(folder, shapes))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Loads the checkpoint's values into the model, on the host, and returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 state as pytorch_model.bin or model.safetensors, in files of at most `max_shard_size`."""
    folder, shapes = _open(Path(checkpoint_dir), tag, exclude_frozen_parameters)
    target = Path(output_dir)
    target.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(shapes, parse_size(max_shard_size) if max_shard_size is not None else None))
    stem, _, ending = NAMES[safe_serialization].partition(".")
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"{stem}.{ending}" if len(parts) == 1 else f"{stem}-{number:05d}-of-{len(parts):05d}.{ending}"
        _write(_read(folder, part), target / name, safe_serialization)
        places |= dict.fromkeys(part, name)
    if len(parts) > 1:
        total = sum(4 * shape.numel() for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=1))


def _open(root: Path, tag: str | None, without_frozen: bool) -> tuple[Path, dict[str, torch.Size]]:
    if tag is None:
        if not (root / LATEST).is_file():
            raise UserError("checkpoint_dir", str(root), f"has no file {LATEST!r}", "give the tag")
        tag = (root / LATEST).read_text().strip()
    checkpoints = list_checkpoints(root / tag)
    if not checkpoints:
        remedy = "give a folder that save_checkpoint wrote (for one of DeepSpeed's own, use its zero_to_fp32.py)"
        raise UserError("checkpoint_dir", str(root / tag), "holds no checkpoint", remedy)
    folder = checkpoints[-1]
    check_whole(folder)
    frozen = set(read_trainer(folder)["frozen"]) if without_frozen else set()
    stored = {n.removeprefix(PREFIX): m.size for n, m in names_in(folder).items() if n.startswith(PREFIX)}
    return folder, {name: size for name, size in stored.items() if name not in frozen}


def _read(folder: Path, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    kinds = {name: names_in(folder)[PREFIX + name].properties.dtype for name in shapes}
    tensors = {PREFIX + name: torch.empty(shape, dtype=kinds[name]) for name, shape in shapes.items()}
    load_tensors(folder, tensors, None)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _parts(shapes: dict[str, torch.Size], limit: int | None) -> Iterator[dict[str, torch.Size]]:
    part: dict[str, torch.Size] = {}
    total = 0
    for name, shape in shapes.items():
        size = 4 * shape.numel()
        if part and limit is not None and total + size > limit:
            yield part
            part, total = {}, 0
        part[name], total = shape, total + size
    yield part


def _write(tensors: dict[str, torch.Tensor], target: Path, safe: bool) -> None:
    partial = target.with_name(f".{target.name}")
    if safe:
        from safetensors.torch import save_file

        save_file(tensors, partial, metadata={"format": "pt"})
    else:
        torch.save(tensors, partial)
    partial.rename(target)


def main(argv: list[str] | None = None) -> int:
    """Entry point: returns 0, or 2 after an error message."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Writes a checkpoint as one plain fp32 state.")
    parser.add_argument("checkpoint_dir", help="the folder given to save_checkpoint, with the file `latest`")
    parser.add_argument("output_dir", help="folder for the result")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file, e.g. 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="default: what `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    args = parser.parse_args(argv)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**vars(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"the fp32 state lies in {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
