"""Scenarios of ZeRO-R, buckets and the breakdown, run on ranks (see ranks.py)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from shardwise.observe.breakdown import PARTS
from support.scenarios import batch_of, parts_of


def tiny_model(config: dict[str, Any], device: str = "cpu", attention: str = "eager") -> Any:
    """The same fresh model on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    torch.manual_seed(0)
    built = AutoConfig.for_model(values.pop("model_type"), **values)
    # Plain attention: the fused kernels of a GPU do not repeat to the bit.
    model = AutoModelForCausalLM.from_config(built, attn_implementation=attention)
    model.config.use_cache = False
    return model.to(device)


def block_gradients(
    config: dict[str, Any], kind: str, shard: int = 1, length: int = 33, device: str = "cpu"
) -> dict[str, Any]:
    """Two micro-batches' gradients with block inputs kept as `kind` says, and what became of these inputs.

    Ranks compute the same, in groups; with `shard` > 1 the parameters are sharded across the groups.
    """
    import torch.distributed as dist
    from torch.distributed._composable import checkpoint as recompute
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.multiprocessing.reductions import StorageWeakRef

    from shardwise.nn.models.build import find_blocks
    from shardwise.parallel.activations.block_inputs import BlockInputs

    ranks = dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(0)  # all ranks share the card; the mesh would look for one per rank
    mesh = init_device_mesh(device, (shard, ranks // shard), mesh_dim_names=("shard", "tensor"))
    model = tiny_model(config, device)
    blocks = find_blocks(model)
    for _, block in blocks:
        recompute(block)
    inputs = None
    if kind != "plain":
        group = mesh["tensor"].get_group() if "sliced" in kind else None
        inputs = BlockInputs(group, host="host" in kind).attach(blocks)
    seen: list[tuple[StorageWeakRef, int]] = []
    for _, block in blocks:
        block.register_forward_pre_hook(
            lambda _, args: seen.append((StorageWeakRef(args[0].untyped_storage()), args[0].nbytes))
        )
    if shard > 1:
        for _, block in blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    held: list[dict[str, int]] = []
    alive: list[list[bool]] = []
    for micro in range(2):
        torch.manual_seed(5 + mesh.get_local_rank("shard"))
        ids = torch.randint(0, 515, (3, length), generator=torch.Generator().manual_seed(micro)).to(device)
        seen.clear()
        loss = model(input_ids=ids, labels=ids).loss
        alive.append([not reference.expired() for reference, _ in seen])
        held.append(inputs.held() if inputs else {})
        full = sum(size for _, size in seen)
        loss.backward()
        held.append(inputs.held() if inputs else {})
    full_grads = [p.grad.full_tensor() if shard > 1 else p.grad for p in model.parameters()]
    return {"loss": loss.item(), "grads": full_grads, "held": held, "alive": alive, "full": full}


def bucket_run(run: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """A few steps by hand: losses, final shards, the largest buffer of any collective, and the units."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardwise.train.loop import accumulate, seed_step

    class Largest(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes: dict[str, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name.startswith(("c10d::_allgather_base", "c10d::_reduce_scatter_base")):
                size = max(t.nbytes for t in args[:2])
                self.bytes[name] = max(self.bytes.get(name, 0), size)
            return func(*args, **(kwargs or {}))

    parts = parts_of(run)
    losses, largest = [], Largest()
    with largest:
        for step in range(steps):
            seed_step(0, step, parts.world.rank)
            losses.append(accumulate(parts, batch_of(parts, step)).item())
            parts.sharded.clip(0.5)
            parts.optimizer.step()
            parts.optimizer.zero_grad()
    groups = {id(m._get_fsdp_state()) for m in parts.sharded.units}
    final = {n: p.to_local().clone() for n, p in parts.sharded.parameters.items()}
    return {"losses": losses, "largest": largest.bytes, "units": len(groups), "final": final}


def timed_steps(run: dict[str, Any], steps: int = 4, windows: int = 4) -> dict[str, Any]:
    """The loop's own pieces under the timer and under WireCount: one window, and what the wire counted.

    Of all windows but the first, which is slower: the least share of time that no window saw, and that no part has.
    """
    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.train.loop import accumulate, seed_step

    parts, shares = parts_of(run), []
    for number in range(windows):
        began, wire = time.perf_counter(), WireCount()
        for inner in range(steps):
            seed_step(0, inner, parts.world.rank)
            with wire:
                with parts.timer.region("data"):
                    batch = batch_of(parts, inner)
                accumulate(parts, batch)
            with parts.timer.region("step"):
                parts.sharded.clip(0.5)
                parts.optimizer.step()
                parts.optimizer.zero_grad()
        window, wall = parts.timer.flush(steps), time.perf_counter() - began
        figures = window.breakdown()
        if number:
            explained = sum(figures[part] for part in PARTS) / figures["whole"]
            shares.append((abs(1 - steps * figures["whole"] / wall), abs(1 - explained)))
    least = [min(each) for each in zip(*shares, strict=True)]
    return {
        "breakdown": figures, "comms": window.comms(), "bytes": dict(wire.bytes), "unseen": least[0],
        "unexplained": least[1],
    }  # fmt: skip


def is_wrapped(run: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the run's timer is on, and whether any collective is watched."""
    from torch.distributed.fsdp import FSDPModule

    parts = parts_of(run)
    kinds = set()
    for module in parts.sharded.model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            kinds |= {type(g._all_gather_comm).__module__ for g in groups if g}
    return parts.timer.on, any(kind.startswith("shardwise") for kind in kinds)


class Shared(nn.Module):
    """Blocks that all take one more tensor on the gradient's path, as decoders take an encoder's output."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.first(x)
        mask = torch.ones_like(x)  # as large as an activation, but off the path of the gradient
        for layer in self.layers:
            x = layer(x, extra, mask)
        return x


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, extra: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + (self.a(x) * self.b(extra).sigmoid()) * mask


def own_loop_breakdown(config: dict[str, Any]) -> dict[str, Any]:
    """A user's loop of two updates of two micro-batches, after one that is not looked at."""
    import shardwise
    from support.tiny import LLAMA

    engine = shardwise.initialize(tiny_model(LLAMA), config=config | {"gradient_accumulation_steps": 2})
    for index in range(6):
        if index == 2:
            engine.breakdown()
        ids = torch.randint(0, 515, (2, 32), generator=torch.Generator().manual_seed(index))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine.breakdown()


def host_inputs_cost(depth: int = 16, batch: int = 4, length: int = 4096, width: int = 2048) -> dict[str, Any]:
    """On a GPU, in bf16: peak memory and time of a step with block inputs on the device, and on the host."""
    from torch.distributed._composable import checkpoint as recompute

    from shardwise.nn.models.build import find_blocks
    from shardwise.parallel.activations.block_inputs import BlockInputs

    config = dict(model_type="llama", hidden_size=width, intermediate_size=5632, num_hidden_layers=depth,
                  num_attention_heads=16, num_key_value_heads=16, vocab_size=2048)  # fmt: skip
    ids = torch.randint(0, 2048, (batch, length), device="cuda")
    result: dict[str, Any] = {"inputs": depth * batch * length * width * 2}
    for kind in ("device", "host"):
        model = tiny_model(config, "cuda", "sdpa").bfloat16()
        blocks = find_blocks(model)
        for _, block in blocks:
            recompute(block)
        if kind == "host":
            BlockInputs(None, host=True).attach(blocks)
        times = []
        for step in range(10):
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            model.zero_grad()
        result[kind] = {"seconds": sorted(times[3:])[3], "peak": torch.cuda.max_memory_allocated()}
        del model, blocks
        torch.cuda.empty_cache()
    return result


def norm_at_stage(stage: int) -> dict[str, float]:
    """The norm of one large gradient, as clipping and as an update during backward find it, and after clipping."""
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    from shardwise.config.schema import LossScale
    from shardwise.distributed.mesh import MeshLayout, join_world
    from shardwise.optim.scaler import LossScaler
    from shardwise.parallel.zero.stages import ShardedModel, shard_model
    from shardwise.parallel.zero.update import OptimizerStep

    ranks = dist.get_world_size()
    world = join_world("cpu", "gloo", 60, MeshLayout(*((ranks, 1) if stage == 0 else (1, ranks))))
    model = nn.Sequential(nn.Embedding(49152, 64), nn.Linear(64, 3))
    shard_model(model, [], world.mesh, stage, "fp32")
    sharded = ShardedModel(model, stage, world.mesh)
    update = OptimizerStep(
        sharded, torch.optim.SGD(model.parameters(), 0.1), LossScaler("cpu", LossScale(), False), None, 1.0
    )
    made, exact = torch.Generator().manual_seed(0), 0.0
    for parameter in sharded.parameters.values():
        whole = 1e-3 * torch.randn(parameter.shape, generator=made)
        exact += whole.double().square().sum().item()
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        update._record_norm(parameter, parameter.grad)
    eager = update._eager_norm().item()
    norm = sharded.clip(0.5).item()
    return {"exact": exact**0.5, "eager": eager, "norm": norm, "clipped": sharded.clip(None).item()}
