"""Optimizers over shards without a model around them: parameters, gradients and checkpoints by numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# What goes wrong in sharding: rows or blocks that do not divide, fewer rows than ranks, stacks, vectors.
# Last dims are multiples of 16: on a CPU fused AdamW computes what is left over by other instructions, to the last bit.
SHAPES = {
    "embed": (71, 96),
    "wide": (40, 208),
    "tall": (130, 48),
    "odd": (45, 144),
    "stack": (3, 40, 64),
    "thin": (1, 6400),
    "norm": (96,),
    "bias": (3,),
    "even": (64, 512),  # whole blocks on each of two ranks, where columns are divided
    "slim": (1536, 7),  # columns that do not divide
    "experts": (4, 40, 64),
    "few": (2, 6, 1104),  # experts that ZeRO can divide within alone, in the middle of a block
}
# What tensor parallelism divides, by the dim; the rest is whole on every rank.
DIVIDED = {"embed": 0, "wide": 1, "tall": 0, "odd": 1, "stack": 0, "thin": 1, "bias": 0, "even": 1, "slim": 1}
EXPERTS = ("experts", "few")
OPTIMIZERS = {
    "adamw": {},
    "adamw-bf16": {"optimizer": "adamw", "optimizer_state": "bf16"},
    "adamw8bit": {},
    "adamw4bit": {},
    "adam-mini": {},
    "adafactor": {},
    "lion": {},
    "lion-bf16": {"optimizer": "lion", "optimizer_state": "bf16"},
    "muon": {},
    "sgd": {},
    "sgd-plain": {"optimizer": "sgd", "betas": (0.0, 0.95)},
}


class Bag(nn.Module):
    """The parameters, with an embedding that Muon must know as one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.token = nn.Embedding(*SHAPES["embed"])
        self.layer = nn.Module()
        for name, shape in SHAPES.items():
            value = nn.Parameter(torch.randn(shape, generator=generator) * 0.1)
            if name == "embed":
                self.token.weight = value
            else:
                (self.layer if name in EXPERTS else self).register_parameter(name, value)

    def shard_as(self, mesh: str) -> None:
        """Divides every parameter over 4 ranks as the assembly does: "tensor 2", "tensor 4", or "expert 2"."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from shardwise.parallel.expert.apply import ExpertParallel

        axis, size = mesh.split()
        root = init_device_mesh("cpu", (4 // int(size), int(size)), mesh_dim_names=("shard", axis))
        for module, key in ((m, n) for m in self.modules() for n, _ in list(m.named_parameters(recurse=False))):
            name = "embed" if module is self.token else key
            place: Any = Replicate() if name not in DIVIDED else Shard(DIVIDED[name])
            if axis == "expert" and name not in EXPERTS:
                continue
            value = distribute_tensor(
                getattr(module, key).detach(), root[axis], [Shard(0) if axis == "expert" else place]
            )
            setattr(module, key, nn.Parameter(value))
        if axis == "expert":
            place = ExpertParallel({}, root[axis], None).placement(root["shard"])  # type: ignore[arg-type]
            fully_shard(self.layer, mesh=root["shard"], shard_placement_fn=place)
            fully_shard(self, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
        else:
            fully_shard(self, mesh=root["shard"])

    def shard(self, mesh: Any) -> None:
        """Divides every parameter as fully_shard does."""
        for module, name in ((m, n) for m in self.modules() for n, _ in list(m.named_parameters(recurse=False))):
            whole = getattr(module, name).detach()
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
            setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements)))


def make(which: str, model: Bag, **settings: Any) -> torch.optim.Optimizer:
    """The optimizer as the config would build it."""
    from shardwise.config.schema import Train
    from shardwise.optim.build import build_optimizer

    values = {"optimizer": which, "learning_rate": 1e-2, "weight_decay": 0.1} | OPTIMIZERS[which] | settings
    return build_optimizer(dict(model.named_parameters()), Train(**values), model)


def steps(model: Bag, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps first … last-1 with gradients that depend on the step alone; some rows never have any."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        for parameter in model.parameters():
            size = torch.rand(parameter.shape[:1] + (1,) * (parameter.ndim - 1), generator=generator)
            grad = torch.randn(parameter.shape, generator=generator) * size**4
            if parameter.shape[0] > 8:
                grad[5] = 0
            parameter.grad = _like(parameter, grad)
        optimizer.step()


def _like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """A full tensor, divided as the parameter is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return full
    sizes, starts = compute_local_shape_and_global_offset(full.shape, parameter.device_mesh, parameter.placements)
    part = torch.zeros_like(parameter.detach())
    part._local_tensor.copy_(full[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))])
    return part


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def snapshot(model: Bag, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and every state, whole."""
    result = {}
    for name, parameter in model.named_parameters():
        result[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            result[f"{name}.{key}"] = whole(value)
    return result


def alone(which: str, count: int) -> dict[str, torch.Tensor]:
    """`count` steps on plain tensors in this process."""
    model = Bag()
    optimizer = make(which, model)
    steps(model, optimizer, 0, count)
    return snapshot(model, optimizer)


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def sharded(names: list[str], count: int, replicas: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    """`count` steps of each optimizer over shards."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, results = _mesh(), {}
    if replicas > 1:
        shape = replicas, dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for which in names:
        model = Bag()
        model.shard(mesh)
        optimizer = make(which, model)
        steps(model, optimizer, 0, count)
        results[which] = snapshot(model, optimizer)
    return results


def on_axes(names: list[str], count: int, mesh: str) -> dict[str, dict[str, torch.Tensor]]:
    """`count` steps of each optimizer over 4 ranks with tensor or expert parallelism."""
    results = {}
    for which in names:
        model = Bag()
        model.shard_as(mesh)
        optimizer = make(which, model)
        steps(model, optimizer, 0, count)
        results[which] = snapshot(model, optimizer)
    return results


def save_and_go_on(names: list[str], folder: str) -> dict[str, Any]:
    """Three steps, a checkpoint, two more steps: the states at both points."""
    from shardwise.checkpoint.store import CheckpointStore
    from shardwise.parallel.zero.stages import ShardedModel
    from shardwise.train.state import tensors_of

    mesh, results = _mesh(), {}
    for which in names:
        model = Bag()
        model.shard(mesh)
        optimizer = make(which, model)
        steps(model, optimizer, 0, 3)
        saved = snapshot(model, optimizer)
        store = CheckpointStore(Path(folder) / which, 1, False, dist.group.WORLD)
        store.save(3, tensors_of(ShardedModel(model, 3, mesh), optimizer), {}, "{}", lambda _: None, None)
        steps(model, optimizer, 3, 5)
        results[which] = saved, snapshot(model, optimizer)
    return results


def load_and_go_on(names: list[str], folder: str) -> dict[str, Any]:
    """What a fresh model and optimizer hold after loading, and two steps later."""
    from shardwise.checkpoint.folders import step_folder
    from shardwise.checkpoint.store import load_tensors
    from shardwise.parallel.zero.stages import ShardedModel
    from shardwise.train.state import prime_optimizer, tensors_of

    mesh, results = _mesh(), {}
    for which in names:
        model = Bag()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.shard(mesh)
        optimizer = make(which, model)
        prime_optimizer(optimizer)
        tensors = tensors_of(ShardedModel(model, 3, mesh), optimizer)
        load_tensors(step_folder(Path(folder) / which, 3), tensors, dist.group.WORLD)
        loaded = snapshot(model, optimizer)
        steps(model, optimizer, 3, 5)
        results[which] = loaded, snapshot(model, optimizer)
    return results


def train_each(run: dict[str, Any], names: list[str], rates: dict[str, float]) -> dict[str, Any]:
    """The real loop with each optimizer: losses, and bytes of state per parameter over all ranks."""
    from shardwise.observe.metrics import read_metrics
    from shardwise.parallel.zero.accounting import held_bytes
    from shardwise.train.loop import fit
    from support.scenarios import parts_of

    results = {}
    for which in names:
        settings = {"optimizer": which} | OPTIMIZERS[which]
        settings["learning_rate"] = rates.get(settings["optimizer"], run["train"]["learning_rate"])
        output = f"{run['output']}/{which}"
        parts = parts_of(run | {"train": run["train"] | settings, "output": output})
        fit(parts)
        records = read_metrics(Path(output) / "metrics.jsonl")
        held = torch.tensor(float(held_bytes(parts.sharded, parts.optimizer)["optimizer"]))
        dist.all_reduce(held)
        masters = 4 * parts.job.parameters
        results[which] = [r["loss"] for r in records if r["kind"] == "train"], (held.item() - masters) / masters * 4
    return results
