"""What tests of tensor parallelism run on ranks (see ranks.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def case_of(kind: str, task: Any = "causal", **changes: Any) -> Any:
    """A tiny model of an architecture, by default as its authors configure it."""
    from transformers import CONFIG_MAPPING

    from shardwise.nn.tiny.case import TinyCase
    from shardwise.nn.tiny.shrink import shrink

    config = shrink(CONFIG_MAPPING[kind]())
    for name, value in changes.items():
        setattr(config, name, value)
    return TinyCase(config, task)


def apart(kind: str, task: Any = "causal", changes: dict[str, Any] | None = None) -> tuple[float, float, str]:
    """How far two ranks along the tensor axis are from one process: loss, worst gradient, whose."""
    from support.trial import along

    verdict = along("tensor", case_of(kind, task, **(changes or {})))
    return verdict.loss, verdict.gradient, verdict.module


def fill_from(model: nn.Module, whole: nn.Module) -> None:
    """Each rank's part of every parameter from a whole model."""
    from shardwise.nn.models.weights import fill_local

    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_local(parameter, values[name].detach())


def on_meta(model: Any) -> Any:
    """The same with parameters that take no memory; buffers stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), empty)
    return model


def two_by_two(kinds: list[tuple[str, Any]], stage: int = 3) -> dict[str, tuple[float, float, str]]:
    """Tensor parallelism × ZeRO, recomputing blocks, from `meta`, in two micro-batches: how far from one process."""
    from torch.distributed._composable import checkpoint

    from shardwise.nn.models.build import find_blocks, materialise
    from shardwise.nn.tiny.case import LossAndGradients, gradients_of, judge, units_of
    from shardwise.objectives.head import token_losses
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.local_trial import try_locally
    from shardwise.parallel.tensor.roles import find_roles
    from shardwise.parallel.tiny_reference import alone
    from shardwise.parallel.zero.stages import ShardedModel, shard_model

    root = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    found = {}
    for kind, task in kinds:
        case = case_of(kind, task)
        roles, model = find_roles(case.model()), on_meta(case.model())
        tensor = apply_tensor_parallel(model, roles, root["tensor"], local=try_locally(case, roles))
        blocks = find_blocks(model)
        for _, block in blocks:
            checkpoint(block)
        shard_model(model, blocks, root["replicate", "shard"], stage, "fp32")
        materialise(model, torch.device("cpu"))
        fill_from(model, case.model())
        model.train()
        mine = root["shard"].get_local_rank()
        labels, total = case.labels(), torch.zeros((), dtype=torch.float64)
        sharded = ShardedModel(model, stage, root["replicate", "shard"])
        for micro in range(2):
            sharded.prepare_micro_batch(last=micro == 1)
            given = {n: x.chunk(4)[2 * mine + micro] for n, x in case.inputs().items()}
            own = labels.chunk(4)[2 * mine + micro].flatten()
            with tensor.active():
                logits = model(**tensor.inputs(given), use_cache=False).logits
                # FSDP averages gradients over its ranks.
                loss = token_losses(logits.flatten(0, 1), own).sum() / units_of(labels)
                (2 * loss).backward()
            total += loss.detach()
        dist.all_reduce(total, group=root["shard"].get_group())
        verdict = judge(LossAndGradients(total.item(), gradients_of(model)), alone(case))
        found[kind] = (verdict.loss, verdict.gradient, verdict.module)
    return found


def local_kinds(names: list[str], broken: str = "") -> list[tuple[dict[str, Any], str]]:
    """What is found of blocks of each architecture: counts that are shared, or why they do not run locally.

    `broken`: the first block's attention or norm looks at all features, or all of the sequence.
    """
    from shardwise.nn.models.build import find_blocks
    from shardwise.parallel.tensor.local_trial import try_locally
    from shardwise.parallel.tensor.roles import find_roles

    results = []
    for name in names:
        case = case_of(name)
        if broken:
            _, block = find_blocks(case.model())[0]
            _look_beyond(type(block.self_attn.o_proj if broken == "attention" else block.input_layernorm), broken)
        for kind in try_locally(case, find_roles(case.model())).values():
            results.append((dict(kind.shares), kind.refusal))
    return results


def _look_beyond(module: type, broken: str) -> None:
    plain: Any = module.forward
    dim = -1 if broken == "attention" else 1

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = plain(self, x - x.mean(dim, keepdim=True))
        return result

    module.forward = forward  # type: ignore[attr-defined]


def local_blocks(kinds: list[str], width: int) -> dict[str, tuple[float, float, int, int]]:
    """Distance from one process (loss, gradient), local blocks, and how many ran locally, for rows of `width`."""
    from shardwise.nn.tiny.case import LossAndGradients, gradients_of, judge, units_of
    from shardwise.objectives.head import token_losses
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.local_trial import try_locally
    from shardwise.parallel.tensor.roles import find_roles

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    results = {}
    for kind in kinds:
        case = case_of(kind)
        roles, model = find_roles(case.model()), case.model()
        inputs, labels = case.inputs(width=width), case.labels(width=width).flatten()
        tensor = apply_tensor_parallel(model, roles, mesh, local=try_locally(case, roles))
        ran = []
        for local in tensor.local.values():
            local.compute = _counted(local.compute, ran)
        with tensor.active():
            logits = model(**tensor.inputs(inputs), use_cache=False).logits
            loss = token_losses(logits.flatten(0, 1), labels).sum() / units_of(labels)
            loss.backward()
        own = LossAndGradients(loss.item(), gradients_of(model))
        single = case.model()
        expected = token_losses(single(**inputs, use_cache=False).logits.flatten(0, 1), labels).sum() / units_of(labels)
        expected.backward()
        verdict = judge(own, LossAndGradients(expected.item(), gradients_of(single)))
        results[kind] = (verdict.loss, verdict.gradient, len(tensor.local), len(ran))
    return results


def _counted(compute: Any, calls: list[Any]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return compute(*args, **kwargs)

    return counted


def parts_filled() -> list[str]:
    """Names of parameters whose parts, cut twice (also unevenly), do not make up the whole."""
    from shardwise.nn.models.build import materialise
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles
    from shardwise.parallel.zero.stages import shard_model

    root = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    case = case_of("llama", vocab_size=93, intermediate_size=54)
    whole = case.model()
    model = on_meta(case.model())
    apply_tensor_parallel(model, find_roles(case.model()), root["tensor"])
    shard_model(model, [], root["replicate", "shard"], 3, "fp32")
    materialise(model, torch.device("cpu"))
    fill_from(model, whole)
    values = dict(whole.named_parameters())
    return [n for n, p in model.named_parameters() if not torch.equal(_full(p), values[n])]


def _full(x: Any) -> torch.Tensor:
    found: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found.detach()


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


def adapted(case: Any, method: str) -> Any:
    """A model with an adapter that has something to say already; the same on every rank."""
    from shardwise.nn.adapters.layers import attach_ia3, attach_lora, features, is_linear
    from shardwise.nn.adapters.quantized import quantize_linears

    model = case.model()
    names = [n for n, m in model.named_modules() if is_linear(m) and m is not model.get_output_embeddings()]
    shapes = {name: features(model.get_submodule(name)) for name in names}
    if method.startswith("q"):
        quantize_linears(model, lambda *_: True, "int8" if "8" in method else "nf4", double=False)
    model.requires_grad_(False)
    for number, name in enumerate(names):
        module = model.get_submodule(name)
        if method == "ia3":
            attach_ia3(module, shapes[name], feedforward=number % 2 == 1)
        else:
            attach_lora(module, shapes[name], 4, 0.5, dora="dora" in method)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1 + (parameter.ndim == 1))
    return model.to(case.dtype)


def adapters_apart(kind: str, methods: list[str]) -> dict[str, tuple[float, float, str, int]]:
    """How far adapted models on a tensor axis are from one process, and how many of their layers are whole."""
    from shardwise.nn.tiny.case import LossAndGradients, gradients_of, judge, units_of
    from shardwise.objectives.head import token_losses
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles

    found = {}
    wide = {"n_embd": 128, "n_inner": 256} if kind == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    for method in methods:
        case = replace(case_of(kind, **wide | ({} if kind == "gpt2" else {"head_dim": 32})), dtype=torch.float32)
        labels = case.labels()
        answers = []
        for divided in (False, True):
            model = adapted(case, method)
            if divided:
                tensor = apply_tensor_parallel(model, find_roles(case.model()), mesh_of_all())
                with tensor.active():
                    logits = model(**tensor.inputs(case.inputs()), use_cache=False).logits
                    loss = token_losses(logits.flatten(0, 1), labels.flatten()).sum() / units_of(labels)
                    loss.backward()
            else:
                logits = model(**case.inputs(), use_cache=False).logits
                loss = token_losses(logits.flatten(0, 1), labels.flatten()).sum() / units_of(labels)
                loss.backward()
            answers.append(LossAndGradients(loss.item(), gradients_of(model)))
        verdict = judge(answers[1], answers[0])
        found[method] = (verdict.loss, verdict.gradient, verdict.module, len(tensor.unsharded))
    return found


class Wire(TorchDispatchMode):
    """Notes every collective and the elements of the larger side of it."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # asked again for what it does to parts
        made = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and not name.startswith(("wait", "_wrap")):
            sizes = [x.numel() for x in tree_iter((args, made)) if isinstance(x, torch.Tensor)]
            self.moved.append((name, max(sizes)))
        return made

    def total(self, word: str) -> int:
        return sum(size for name, size in self.moved if word in name)


def block_traffic() -> list[list[tuple[str, int]]]:
    """Collectives of one Llama block, forward and backward, and the elements of its hidden states."""
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles

    case, mesh = case_of("llama"), mesh_of_all()
    model = case.model()
    tensor = apply_tensor_parallel(model, find_roles(case.model()), mesh)
    x = torch.randn(4, 16, 32, dtype=torch.float64)
    hidden = DTensor.from_local(x.chunk(mesh.size(), 1)[mesh.get_local_rank()], mesh, [Shard(1)]).requires_grad_()
    positions = model.model.rotary_emb(x, torch.arange(16)[None])
    with tensor.active():
        with torch.no_grad():  # what has never run is tried first
            model.model.layers[0](hidden, attention_mask=None, position_embeddings=positions)
        with Wire() as forward:
            made = model.model.layers[0](hidden, attention_mask=None, position_embeddings=positions)
        with Wire() as backward:
            made.backward(made.detach())
    assert made.placements == (Shard(1),)
    return [forward.moved, backward.moved, [("hidden", x.numel())]]


def head_traffic(joined: bool) -> tuple[float, float, str, list[tuple[str, int]], int, int]:
    """Loss over a cut vocabulary, by head and loss as one or by logits: how far off, and what the step moves."""
    from shardwise.nn.tiny.case import LossAndGradients, gradients_of, judge, units_of
    from shardwise.objectives.head import HeadLoss, token_losses
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles
    from shardwise.parallel.tiny_reference import alone

    case = case_of("llama", vocab_size=1501, tie_word_embeddings=False)
    model, labels = case.model(), case.labels()
    tensor = apply_tensor_parallel(model, find_roles(case.model()), mesh_of_all())
    with tensor.active(), Wire() as wire:
        if joined:
            losses = HeadLoss(model.lm_head).losses(model, case.inputs() | {"use_cache": False}, labels)
        else:
            logits = model(**case.inputs(), use_cache=False).logits
            losses = token_losses(logits.flatten(0, 1), labels.flatten())
        loss = losses.sum() / units_of(labels)
        loss.backward()
    verdict = judge(LossAndGradients(loss.item(), gradients_of(model)), alone(case))
    return verdict.loss, verdict.gradient, verdict.module, wire.moved, labels.numel() * 32, labels.numel() * 1501


def masks_apart(kind: str) -> dict[str, float]:
    """How far logits are from one process with packed documents and with a padded batch."""
    from shardwise.data.documents import Documents
    from shardwise.nn.attention.document_mask import RowsMask
    from shardwise.nn.attention.varlen import install
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles

    case = case_of(kind)
    whole, model = case.model(), case.model()
    tensor = apply_tensor_parallel(model, find_roles(case.model()), mesh_of_all())
    assert install(whole)
    documents = Documents.of_lengths([[5, 11], [16], [3, 3, 10], [16]])
    padded = torch.ones(4, 16, dtype=torch.int64)
    padded[1, 9:] = 0
    found = {}
    for name, mask in {"packed": RowsMask(documents), "padded": padded}.items():
        given = case.inputs() | {"attention_mask": mask, "use_cache": False}
        given |= {"position_ids": documents.positions} if name == "packed" else {}
        wanted = whole(**given).logits
        with tensor.active():
            logits = model(**tensor.inputs(given)).logits
        found[name] = float((_full(logits) - wanted)[padded.bool()].abs().max())
    return found


def dropped() -> dict[str, bool]:
    """Which parts of a dropped-out tensor differ between two ranks, and whether recomputation draws the same again."""
    from torch.utils.checkpoint import checkpoint

    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles

    torch.manual_seed(3)
    case, mesh = case_of("gpt2"), mesh_of_all()
    model = case.model()
    tensor = apply_tensor_parallel(model, find_roles(case.model()), mesh)
    ones = torch.ones(4, 64, 32)
    found = {}
    with tensor.active():
        for name, where in {"cut": Shard(1), "whole": Replicate()}.items():
            x = distribute_tensor(ones, mesh, [where]).requires_grad_()
            y = checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=False)
            torch.rand(7)  # whatever happens in between
            y.sum().backward()
            parts = [torch.empty_like(y.to_local()) for _ in range(mesh.size())]
            dist.all_gather(parts, y.to_local().detach().contiguous())
            found[f"{name} alike"] = torch.equal(parts[0], parts[1])
            found[f"{name} again"] = torch.equal(_full(x.grad), _full(y))
    found["in step"] = len({tuple(x) for x in _gathered(torch.rand(4)).tolist()}) == 1
    return found


def dropout_recomputed() -> float:
    """How far gradients of a model with dropout everywhere are with its blocks recomputed from those without."""
    from torch.distributed._composable import checkpoint

    from shardwise.nn.models.build import find_blocks
    from shardwise.nn.tiny.case import LossAndGradients, gradients_of, judge
    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles

    answers = []
    for again in (False, True):
        case = case_of("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
        model = case.model()
        tensor = apply_tensor_parallel(model, find_roles(case.model()), mesh_of_all())
        for _, block in find_blocks(model) if again else ():
            checkpoint(block)
        torch.manual_seed(11)
        with tensor.active():
            loss = model(**case.inputs(), use_cache=False).logits.square().mean()
            loss.backward()
        answers.append(LossAndGradients(float(_full(loss)), gradients_of(model)))
    verdict = judge(*answers)
    return max(verdict.loss, verdict.gradient)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def saved_and_loaded(folder: str) -> list[str]:
    """A model cut twice, saved by DCP and loaded into one that is cut another way; what did not come back."""
    import torch.distributed.checkpoint as dcp

    from shardwise.parallel.tensor.apply import apply_tensor_parallel
    from shardwise.parallel.tensor.roles import find_roles
    from shardwise.parallel.zero.stages import shard_model

    case = case_of("gpt2")
    whole, roles = dict(case.model().named_parameters()), find_roles(case.model())
    root = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    first, second = case.model(), case.model()
    apply_tensor_parallel(first, roles, root["tensor"])
    shard_model(first, [], root["replicate", "shard"], 3, "fp32")
    dcp.save({"model": dict(first.named_parameters())}, checkpoint_id=folder)
    apply_tensor_parallel(second, roles, mesh_of_all())
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    dcp.load({"model": dict(second.named_parameters())}, checkpoint_id=folder)
    return [n for n, p in second.named_parameters() if not torch.equal(_full(p), whole[n])]
