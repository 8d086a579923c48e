"""What ranks do in the tests of expert parallelism."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from shardwise.config.methods import Lora, Qlora
from shardwise.foresight.zoo.run import tiny_case
from shardwise.nn.adapters.layers import features
from shardwise.nn.adapters.plan import attach, plan_method
from shardwise.nn.adapters.quantized import quantize_linears
from shardwise.nn.models.build import find_blocks, materialise
from shardwise.nn.models.weights import fill_local
from shardwise.nn.tiny.case import (
    CannotParallelize,
    LossAndGradients,
    TinyCase,
    gradients_of,
    judge,
    mean_loss,
    units_of,
)
from shardwise.parallel.expert.apply import ExpertParallel, apply_expert_parallel, count_loads, find_experts
from shardwise.parallel.tiny_reference import alone
from support.trial import along

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data", "context")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


def several(calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Functions of this module one after the other, each by name with its arguments."""
    return {what: globals()[name](*args) for what, (name, *args) in calls.items()}


def trials(names: list[str]) -> dict[str, Any]:
    """The trial of the zoo, one architecture after the other."""
    return {name: along("expert", tiny_case(name, "causal")) for name in names}


def refused(name: str, experts: int | None = None) -> str:
    """Why a model cannot be spread; `experts`: how many it has, if not as many as other tiny models."""
    case = tiny_case(name, "causal")
    if experts is not None:
        case.config.num_local_experts = experts
    try:
        apply_expert_parallel(case.model(), mesh_of(dist.get_world_size()))
    except CannotParallelize as refusal:
        return str(refusal)
    return ""


def sharded(name: str, sizes: tuple[int, ...], expert: int, stage: int, folder: str, few: bool = False) -> Any:
    """On meta, divided, filled from a whole model, trained on one batch; saved and loaded again.

    With `few`, a rank has one expert, which sharding then divides within.
    """
    case, ranks = tiny_case(name, "causal"), dist.get_world_size()
    if few:
        case.config.num_local_experts = expert
    root = mesh_of(*sizes)
    dense = root["data", "context"]._flatten("shard") if len(sizes) > 1 else root
    experts_root = mesh_of(ranks // expert, expert, names=("data", "expert"))
    whole = case.model()
    model = copy.deepcopy(whole).to("meta")
    parallel = apply_expert_parallel(model, experts_root["expert"])
    _shard(model, parallel, dense, experts_root["data"], stage)
    materialise(model, torch.device("cpu"))
    parameters, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            fill_local(parameter, parameters[key].detach())
        for key, buffer in model.named_buffers():
            buffer.copy_(buffers[key])
    filled = all(torch.equal(p.full_tensor(), parameters[key]) for key, p in model.named_parameters())
    held = sum(p.to_local().numel() for p in parallel.parameters)
    labels, place = case.labels(), dist.get_rank()
    mine = {key: value.chunk(ranks)[place] for key, value in case.inputs().items()}
    loss = mean_loss(model(**mine, use_cache=False).logits, labels.chunk(ranks)[place], units_of(labels))
    (loss * ranks).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    verdict = judge(LossAndGradients(total.item(), gradients_of(model)), alone(case))
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
    experts = sum(p.numel() for m in find_experts(whole).values() for p in m.parameters())
    return {"verdict": verdict, "filled": filled, "loaded": loaded, "held": held, "experts": experts}


def _shard(model: Any, parallel: ExpertParallel, dense: DeviceMesh, data: DeviceMesh, stage: int) -> None:
    options: dict[str, Any] = {"reshard_after_forward": stage == 3}
    for module in parallel.modules:
        fully_shard(module, mesh=data, shard_placement_fn=parallel.placement(data), **options)
    parallel.average_over(dense.size(), data)
    for _, block in find_blocks(model):
        fully_shard(block, mesh=dense, **options)
    fully_shard(model, mesh=dense, **options)


def stack(name: str, case: TinyCase | None = None) -> nn.Module:
    """One layer's experts of a tiny model, in double precision."""
    case = case or tiny_case(name, "causal")
    return next(iter(find_experts(case.model()).values()))


def tokens(rank: int, chosen: list[list[int]], width: int) -> Given:
    """Rows of a rank that go to the experts of a list."""
    random = torch.Generator().manual_seed(rank)
    hidden = torch.randn(len(chosen), width, generator=random, dtype=torch.float64)
    index = torch.tensor(chosen, dtype=torch.int64).reshape(len(chosen), len(chosen[0]) if chosen else 2)
    weights = torch.rand(*index.shape, generator=random, dtype=torch.float64)
    return hidden.requires_grad_(), index, weights.requires_grad_()


def skewed(name: str, choices: list[list[list[int]]], recompute: bool = False) -> dict[str, float]:
    """How far a stack that is spread is from one that is not; each rank's tokens choose the experts of its list."""
    rank, mesh = dist.get_rank(), mesh_of(dist.get_world_size())
    plain = stack(name)
    holder = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    apply_expert_parallel(holder, mesh)
    width = tiny_case(name, "causal").config.hidden_size
    apart = {}
    for other, chosen in enumerate(choices):
        hidden, index, weights = tokens(other, chosen, width)
        if chosen:
            wanted = plain(hidden, index, weights)
            wanted.square().sum().backward()
        if other == rank:
            given = tokens(rank, chosen, width)
            run = holder["experts"]
            got = checkpoint(run, *given, use_reentrant=False) if recompute else run(*given)
            got.square().sum().backward()
            assert got.shape == given[0].shape
            if chosen:
                apart["output"] = _apart(got, wanted)
                apart["hidden"] = _apart(given[0].grad, hidden.grad)
                apart["weights"] = _apart(given[2].grad, weights.grad)
    for key, p in plain.named_parameters():
        apart[key] = _apart(dict(holder["experts"].named_parameters())[key].grad.full_tensor(), p.grad)
    return apart


def _apart(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).detach().abs().max())


def beside_tensor(name: str, count: int, as_dtensor: tuple[bool, bool, bool]) -> dict[str, float]:
    """2 data × 2 tensor ranks, experts over all four: tokens that tensor ranks have in common are sent once."""
    root = mesh_of(2, 2, names=("data", "tensor"))
    tensor = root["tensor"]
    plain = stack(name)
    holder = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    apply_expert_parallel(holder, mesh_of(4, names=("expert",)))
    width = tiny_case(name, "causal").config.hidden_size
    apart: dict[str, float] = {}
    for data in range(2):
        chosen = [[(i + data) % 4, (i + data + 1 + i % 2) % 4] for i in range(count)]
        hidden, index, weights = tokens(data, chosen, width)
        wanted = plain(hidden, index, weights)
        wanted.square().sum().backward()
        if data == root["data"].get_local_rank():
            mine = tokens(data, chosen, width)
            given = [
                DTensor.from_local(x, tensor, [Replicate()], run_check=False) if as_one else x
                for x, as_one in zip(mine, as_dtensor, strict=True)
            ]
            got = holder["experts"](*given)
            assert isinstance(got, DTensor) == as_dtensor[0]
            got.square().sum().backward()
            apart["output"] = _apart(got.full_tensor() if isinstance(got, DTensor) else got, wanted)
            apart["hidden"] = _apart(mine[0].grad, hidden.grad)
            apart["weights"] = _apart(mine[2].grad, weights.grad)
    for key, p in plain.named_parameters():
        apart[key] = _apart(dict(holder["experts"].named_parameters())[key].grad.full_tensor(), p.grad)
    return apart


def wire(name: str) -> dict[str, int]:
    """Bytes that all-to-alls move in a forward and a backward, and what the formula says."""
    case, mesh = tiny_case(name, "causal"), mesh_of(dist.get_world_size())
    model = case.model()
    apply_expert_parallel(model, mesh)
    moved, real = {"counts": 0, "rows": 0, "calls": 0}, dist.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved["rows" if given.is_floating_point() else "counts"] += given.numel() * given.element_size()
        moved["calls"] += 1
        return real(output, given, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        model(**case.inputs(), use_cache=False).logits.sum().backward()
    finally:
        dist.all_to_all_single = real
    ids = case.inputs()["input_ids"]
    routed = ids.numel() * case.config.num_experts_per_tok
    layers = len(find_experts(model))
    return moved | {"layers": layers, "formula": layers * 4 * routed * case.config.hidden_size * 8}


def loads(name: str) -> dict[str, Any]:
    """Tokens by expert, spread and not, with recomputation, and a summary."""
    case, mesh = tiny_case(name, "causal"), mesh_of(dist.get_world_size())
    plain, model = case.model(), case.model()
    counted, parallel = count_loads(plain, torch.device("cpu")), apply_expert_parallel(model, mesh)
    assert counted is not None
    plain(**case.inputs(), use_cache=False).logits.sum().backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mine = {key: value.chunk(2)[dist.get_rank()] for key, value in case.inputs().items()}
    model(**mine, use_cache=False).logits.sum().backward()
    wanted, got = counted.read(), parallel.loads.read(mesh.get_group())
    parallel.loads.reset()
    return {
        "wanted": wanted, "got": got, "layers": parallel.loads.layers, "balance": counted.balance(wanted),
        "reset": int(parallel.loads.read().sum()),
    }  # fmt: skip


def adapted(name: str, method: Lora) -> dict[str, float]:
    """Adapters on the dense layers, experts frozen or in four bits, spread and not: how far gradients are apart."""
    case = TinyCase(tiny_case(name, "causal").config, "causal", dtype=torch.float32)
    plain, model = _with_adapters(case, method), _with_adapters(case, method)
    rank, mesh = dist.get_rank(), mesh_of(dist.get_world_size())
    apply_expert_parallel(model, mesh)
    inputs, ranks = case.inputs(), mesh.size()
    wanted = plain(**inputs, use_cache=False).logits
    wanted.square().mean().backward()
    logits = model(**{k: v.chunk(ranks)[rank] for k, v in inputs.items()}, use_cache=False).logits
    (logits.square().mean() / ranks).backward()
    apart = {"logits": _apart(logits, wanted.chunk(ranks)[rank])}
    theirs = dict(plain.named_parameters())
    for key, p in model.named_parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            apart[key] = _apart(p.grad, theirs[key].grad) / float(theirs[key].grad.abs().max() + 1e-12)
    return {"worst": max(apart.values()), "trained": len(apart)}


def _with_adapters(case: TinyCase, method: Lora) -> Any:
    model = case.model()
    plan = plan_method(model, method)
    shapes = {name: features(model.get_submodule(name)) for name in plan.targets}
    if isinstance(method, Qlora):
        quantize_linears(model, lambda *_: True, method.bits, method.double_quant)
    model.requires_grad_(False)
    attach(model, plan, shapes)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=random) * 0.1)
    return model
