"""What ranks do in the tests of expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.models.build import find_blocks, materialise
from shardwise.models.weights import fill_local
from shardwise.parallel.expert import ExpertParallel, expert_meshes, spread_experts
from shardwise.parallel.trial import Answer, Case, alone, gradients_of, judge, mean_loss, units_of
from shardwise.parallel.zoo import tiny_case


def _root(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "context")[: len(sizes)])


def _share(case: Case, model: Any, place: int, ranks: int) -> torch.Tensor:
    labels = case.labels()
    mine = {name: value.chunk(ranks)[place] for name, value in case.inputs().items()}
    return mean_loss(model(**mine, use_cache=False).logits, labels.chunk(ranks)[place], units_of(labels))


def _on_meta(case: Case) -> Any:
    with torch.device("meta"):
        model = case.model()
    return model


def _shard(model: Any, parallel: ExpertParallel, dense: DeviceMesh, data: DeviceMesh, stage: int) -> None:
    options: dict[str, Any] = {"reshard_after_forward": stage == 3}
    for module in parallel.modules:
        fully_shard(module, mesh=data, shard_placement_fn=parallel.placement(data), **options)
    parallel.average_over(dense.size(), data)
    for _, block in find_blocks(model):
        fully_shard(block, mesh=dense, **options)
    fully_shard(model, mesh=dense, **options)


def sharded(name: str, expert: int, stage: int, folder: str) -> dict[str, Any]:
    """Filled from a whole model, sharded, trained on one batch; saved and loaded again."""
    case = tiny_case(name, "causal")
    root = _root(dist.get_world_size())
    meshes = expert_meshes(root, ("data",), expert)
    whole, model = case.model(), case.model().to("meta")
    parallel = spread_experts(model, meshes.expert)
    _shard(model, parallel, root, meshes.data, stage)
    materialise(model, torch.device("cpu"))
    source = dict(whole.named_parameters())
    buffers = dict(whole.named_buffers())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            fill_local(parameter, source[key].detach())
        for key, buffer in model.named_buffers():
            buffer.copy_(buffers[key])
    filled = all(torch.equal(p.full_tensor(), source[key]) for key, p in model.named_parameters())
    ranks = dist.get_world_size()
    loss = _share(case, model, dist.get_rank(), ranks)
    (loss * ranks).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    verdict = judge(Answer(total.item(), gradients_of(model)), alone(case))
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    states = {key: p.detach() for key, p in model.named_parameters()}
    kept = {key: p.full_tensor().clone() for key, p in states.items()}
    dcp.save({"model": states}, checkpoint_id=folder)
    for p in states.values():
        p.to_local().zero_()
    dcp.load({"model": states}, checkpoint_id=folder)
    loaded = all(torch.equal(p.full_tensor(), kept[key]) for key, p in states.items())
    return {"verdict": verdict, "filled": filled, "loaded": loaded}
