"""Each private name of torch and transformers does what the package relies on; a version that moves one fails here.

One test per name of core/compat: a name without a test fails too. And nothing private is used outside core/compat.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardwise.core.compat import hf_private as hf
from shardwise.core.compat import torch_private as tp

SOURCE = Path(tp.__file__).parents[2]
SEAMS: dict[str, Callable[[], None]] = {}


def seam(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Marks the check of one name, or of names that are of use together only."""

    def add(check: Callable[[], None]) -> Callable[[], None]:
        for name in names:
            assert name not in SEAMS, name
            SEAMS[name] = check
        return check

    return add


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=tp.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def public(module: Any) -> set[str]:
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    tree = ast.parse(inspect.getsource(module))
    assigned = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    named = {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    lazy = set(getattr(module, "LAZY", ()))
    typed = {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return {n for n in own | assigned | named | lazy | typed if not n.startswith("_")} - {"LAZY", "TORCH"}


def test_every_name_has_a_check() -> None:
    assert public(tp) | public(hf) == set(SEAMS)


# ---------------------------------------------------------------- torch: groups, fake tensors, trees, operators


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


@seam("HashStore", "process_groups", "default_store")
def _store() -> None:
    (group,) = tp.process_groups()
    assert group.size() == 1 and dist.get_process_group_ranks(group) == [0]
    tp.default_store().set("key", "value")
    assert tp.default_store().get("key") == b"value" and hasattr(tp.default_store(), "clone")


@seam("resolve_process_group")
def _resolve() -> None:
    assert tp.resolve_process_group(dist.group.WORLD.group_name) is dist.group.WORLD


@seam("all_gather_flat", "reduce_scatter_flat", "all_reduce_flat")
def _flat_collectives() -> None:
    x, name = torch.arange(4.0), dist.group.WORLD.group_name
    for y in (tp.all_gather_flat(x, 1, name), tp.reduce_scatter_flat(x, 1, name), tp.all_reduce_flat(x, name)):
        assert type(y) is torch.Tensor and torch.equal(x, y) and y.data_ptr() != x.data_ptr()


@seam("FakeTensor", "FakeTensorMode", "unset_fake_temporarily")
def _fake() -> None:
    with tp.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ones(1 << 40) + torch.ones(())
        assert isinstance(fake, tp.FakeTensor) and fake.nbytes == 4 << 40
        with tp.unset_fake_temporarily():
            assert torch.ones(2).sum().item() == 2
    assert isinstance(mode.from_tensor(torch.ones(2)), tp.FakeTensor)


@seam("FakeStore")
def _fake_group() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=tp.FakeStore(), rank=3, world_size=64)
    there = torch.ones(1)
    dist.all_reduce(there)
    assert dist.get_world_size() == 64 and there.item() == 1


class Seen(tp.TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@seam("TorchDispatchMode", "schema_of", "is_group_object")
def _dispatch() -> None:
    with Seen() as seen:
        torch.ones(2).add_(1)
        dist.all_reduce(torch.ones(1))
    names = [tp.schema_of(func).name for func, _ in seen.calls]
    assert "aten::add_" in names and "c10d::allreduce_" in names
    first = tp.schema_of(next(func for func, _ in seen.calls if "add_" in str(func))).arguments[0]
    assert first.name == "self" and first.alias_info.is_write
    args = seen.calls[names.index("c10d::allreduce_")][1]
    (group,) = [arg for arg in args if tp.is_group_object(arg)]
    assert dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)) == [0]


@seam("tree_flatten", "tree_unflatten", "tree_map", "tree_leaves", "tree_iter", "tree_flatten_with_path", "keystr")
def _trees() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = tp.tree_flatten(tree)
    assert leaves == [1, 2, None, 3] == tp.tree_leaves(tree) == list(tp.tree_iter(tree))
    assert tp.tree_unflatten(leaves, spec) == tree
    assert tp.tree_map(lambda x: x and -x, tree) == {"a": [-1, (-2, None)], "b": -3}
    paths = [(tp.keystr(path), leaf) for path, leaf in tp.tree_flatten_with_path(tree)[0]]
    assert paths[0] == ("['a'][0]", 1)


@seam("register_pytree_node")
def _register() -> None:
    class Pair:
        def __init__(self, *both: int) -> None:
            self.both = both

    tp.register_pytree_node(Pair, lambda pair: (list(pair.both), None), lambda both, _: Pair(*both))
    assert tp.tree_map(lambda x: x + 1, [Pair(1, 2)])[0].both == (2, 3)


@seam("functorch_config")
def _functorch() -> None:
    with tp.functorch_config.patch(ban_recompute_materialized_backward=False):
        assert tp.functorch_config.ban_recompute_materialized_backward is False
    assert tp.functorch_config.ban_recompute_materialized_backward is True


@seam("ConvNd")
def _conv() -> None:
    assert isinstance(nn.Conv1d(1, 1, 1), tp.ConvNd) and isinstance(nn.Conv3d(1, 1, 1), tp.ConvNd)
    assert not isinstance(nn.Linear(1, 1), tp.ConvNd)


def many() -> list[torch.Tensor]:
    return [torch.full((2,), 3.0), torch.full((3,), -4.0)]


@seam("foreach_add_", "foreach_mul_", "foreach_lerp", "foreach_lerp_", "foreach_sign_", "foreach_norm")
def _foreach() -> None:
    ones = [torch.ones(2), torch.ones(3)]
    added = many()
    tp.foreach_add_(added, ones, alpha=-2.0)
    tp.foreach_mul_(added, 2.0)
    assert [t[0].item() for t in added] == [2, -12]
    assert [t[0].item() for t in tp.foreach_lerp(many(), ones, 0.5)] == [2, -1.5]
    tp.foreach_lerp_(added, ones, 1.0)
    assert [t[0].item() for t in added] == [1, 1]
    signs = many()
    tp.foreach_sign_(signs)
    assert [t[0].item() for t in signs] == [1, -1]
    assert [t.item() for t in tp.foreach_norm(many(), 2, torch.float32)] == pytest.approx([18**0.5, 48**0.5])


@seam("fused_adamw_")
def _adamw() -> None:
    parameter, ours = nn.Parameter(torch.ones(4)), torch.ones(4)
    parameter.grad = torch.arange(4.0)
    torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.2, fused=True).step()
    mean, square = torch.zeros(4), torch.zeros(4)
    tp.fused_adamw_(
        [ours], [torch.arange(4.0)], [mean], [square], [], [torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.999,
        weight_decay=0.2, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert torch.equal(ours, parameter.detach()) and mean[1] != 0


@seam("scaled_mm")
def _scaled() -> None:
    with tp.FakeTensorMode():  # CPUs die in it on some shapes
        left, right = (torch.empty(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones(())
        out = tp.scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        assert out.shape == (16, 16) and out.dtype == torch.bfloat16


@seam("safe_softmax")
def _softmax() -> None:
    assert tp.safe_softmax(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]), -1).tolist() == [[0.5, 0.5], [0, 0]]


@seam("cpu_flash_attention", "cpu_flash_attention_backward")
def _attention() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    out, sums = tp.cpu_flash_attention(q, k, v, 0.0, True, scale=0.3)[:2]
    assert torch.allclose(out, wanted, atol=1e-6)
    scores = (q @ k.mT * 0.3).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.allclose(sums, scores.logsumexp(-1), atol=1e-5)
    gradient = torch.randn_like(out)
    given = [x.detach() for x in (gradient, q, k, v, out, sums)]
    found = tp.cpu_flash_attention_backward(*given, 0.0, True, scale=0.3)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, (q, k, v), gradient), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def arguments(operator: Any) -> list[str]:
    return [a.name for a in tp.schema_of(operator.default).arguments]


@seam("flash_attention", "flash_attention_backward", "cudnn_attention", "cudnn_attention_backward")
def _gpu_attention() -> None:
    """What a machine without a GPU can hold them to: the order of what they take and give."""
    assert arguments(tp.flash_attention) == [
        "query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ]  # fmt: skip
    assert arguments(tp.flash_attention_backward) == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "philox_seed", "philox_offset", "scale",
    ]  # fmt: skip
    assert arguments(tp.cudnn_attention) == [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask",
        "scale",
    ]  # fmt: skip
    assert arguments(tp.cudnn_attention_backward) == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias",
        "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip
    returns = [r.name for r in tp.schema_of(tp.flash_attention.default).returns]
    assert returns[:2] == ["output", "logsumexp"] and len(returns) == 9


# ---------------------------------------------------------------- torch: tensors, autograd, loss scaling


@seam("storage_key")
def _storage() -> None:
    tensor = torch.ones(4)
    key = tp.storage_key(tensor.untyped_storage())
    assert key == tp.storage_key(tensor[2:].untyped_storage()) != tp.storage_key(torch.ones(4).untyped_storage())
    with tp.FakeTensorMode():
        one, other = torch.ones(4), torch.ones(4)
        assert tp.storage_key(one.untyped_storage()) != tp.storage_key(other.untyped_storage())


@seam("version_of")
def _version() -> None:
    tensor = torch.ones(4)
    before = tp.version_of(tensor)
    tensor.add_(1)
    assert tp.version_of(tensor) == before + 1


@seam("is_view")
def _view() -> None:
    tensor = torch.ones(4, requires_grad=True) * 2
    assert tp.is_view(tensor[1:]) and not tp.is_view(tensor)


@seam("has_accumulate_hooks")
def _hooks() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not tp.has_accumulate_hooks(parameter)
    hook = parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert tp.has_accumulate_hooks(parameter)
    hook.remove()
    assert not tp.has_accumulate_hooks(parameter)


@seam("in_backward", "at_end_of_backward")
def _backward() -> None:
    seen: list[Any] = []
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    second.register_hook(lambda g: seen.append(tp.in_backward()))
    second.register_hook(lambda g: tp.at_end_of_backward(lambda: seen.append(first.grad is not None)))
    assert not tp.in_backward()
    (first * (second * 2)).sum().backward()
    assert seen == [True, True] and not tp.in_backward()


@seam("without_torch_function")
def _functions() -> None:
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    with Refusing(), tp.without_torch_function():
        assert torch.add(torch.Tensor([1.0]), 1).numel() == 1


@seam("OpenGradScaler")
def _scaler() -> None:
    scaler = tp.OpenGradScaler("cpu", init_scale=8.0)
    assert scaler.set_scale(4.0, 2).type == "cpu"
    scaler.start(torch.device("cpu"))
    scale, growth = scaler.scale_and_growth()
    assert scale.item() == 4 and growth.item() == 2 == scaler.growth()
    scaler.set_scale(16.0, 3)
    assert scale.item() == 16 and scaler.growth() == 3
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    for gradient, overflow in ((16.0, 0), (torch.inf, 1)):
        parameter.grad = torch.tensor([gradient])
        scaler.unscale_(optimizer)
        assert [inf.item() for inf in scaler.overflows_of(optimizer)] == [overflow]
        assert [inf.item() for inf in scaler.take_overflows()] == [overflow]  # else a second unscale_ is refused


# ---------------------------------------------------------------- torch: DTensor


@seam("DTensorSpec", "TensorMeta", "spec_of", "local_tensor", "set_local_tensor")
def _dtensor() -> None:
    full = torch.arange(6.0).view(3, 2)
    tensor = distribute_tensor(full, mesh(), [Shard(0)])
    spec = tp.spec_of(tensor)
    assert isinstance(spec, tp.DTensorSpec) and spec.placements == (Shard(0),) and spec.shape == (3, 2)
    assert type(tp.local_tensor(tensor)) is torch.Tensor and torch.equal(tp.local_tensor(tensor), full)
    tp.set_local_tensor(tensor, full + 1)
    assert torch.equal(tensor.to_local(), full + 1)
    meta = tp.TensorMeta(torch.Size((30, 2)), (2, 1), torch.float32)
    outline = torch.empty((), dtype=torch.float32).expand(3, 2)
    made = DTensor(outline, tp.DTensorSpec(mesh(), (Shard(0),), tensor_meta=meta), requires_grad=False)
    assert made.shape == (30, 2) and tp.local_tensor(made).stride() == (0, 0)


@seam("compute_local_shape_and_global_offset")
def _offset() -> None:
    assert tp.compute_local_shape_and_global_offset((3, 2), mesh(), (Shard(0),)) == ((3, 2), (0, 0))


@seam("implicit_replication")
def _implicit() -> None:
    tensor = distribute_tensor(torch.ones(2), mesh(), [Replicate()])
    with tp.implicit_replication(), tp.implicit_replication():
        pass
    with pytest.raises(RuntimeError):
        tensor + torch.ones(2)
    with tp.implicit_replication():
        assert isinstance(tensor + torch.ones(2), DTensor)


@seam("set_dtensor_handler")
def _handler() -> None:
    """And what it is for: the backward of x[:, positions], which torch 2.11 alone has no rule for."""
    from shardwise.parallel.tensor.dtensor_rules import add_rules

    add_rules()
    full = torch.randn(2, 5, 3)
    tensor = distribute_tensor(full, mesh(), [Replicate()]).requires_grad_()
    positions = torch.tensor([3, 0, 3])
    with tp.implicit_replication():
        picked = tensor[:, positions]
        gradient = DTensor.from_local(torch.ones(2, 3, 3), mesh(), [Partial()], run_check=False)
        (found,) = torch.autograd.grad(picked, tensor, gradient)
    wanted = torch.zeros_like(full)
    wanted[:, 3], wanted[:, 0] = 2, 1
    assert torch.equal(found.full_tensor(), wanted)

    calls: list[Any] = []
    with handled(torch.ops.aten.frac.default, lambda op, args, kwargs: calls.append(args) or args[0]):
        distribute_tensor(full, mesh(), [Replicate()]).frac()
    assert len(calls) == 1


@contextmanager
def handled(operator: Any, handler: Any) -> Iterator[None]:
    tp.set_dtensor_handler(operator, handler)
    try:
        yield
    finally:
        del DTensor._op_dispatcher._custom_op_handlers[operator]


# ---------------------------------------------------------------- torch: FSDP


def sharded(recompute: bool = False, **options: Any) -> nn.Sequential:
    """Two units of a linear layer each, and a root without parameters of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        if recompute:
            tp.checkpoint(layer)
        fully_shard(layer, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def unit_of(model: Any) -> tuple[FSDPModule, Any]:
    (group,) = tp.parameter_groups(model[0])
    return model[0], group


@seam("fsdp_state", "parameter_groups")
def _state() -> None:
    model = sharded()
    assert tp.fsdp_state(model) is tp.fsdp_state(model) and tp.fsdp_state(model) is not tp.fsdp_state(model[0])
    assert tp.parameter_groups(model) == []
    _, group = unit_of(model)
    names = {one.sharded_param.shape for one in group.fsdp_params}
    assert names == {(4, 4), (4,)} and all(one.sharded_param is not None for one in group.fsdp_params)
    assert group.post_forward_mesh_info is not None and callable(group.post_backward)
    assert isinstance(group.fsdp_params[0].all_gather_outputs, list)
    assert group.fsdp_params[0].unsharded_accumulated_grad is None
    joined = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fully_shard(joined, mesh=mesh())
    assert tp.fsdp_state(joined[0]) is tp.fsdp_state(joined[1])


@seam("gather_streams")
def _streams() -> None:
    model = sharded()
    assert tp.gather_streams(tp.fsdp_state(model[0])) == []
    model(torch.ones(1, 4))
    assert len(tp.gather_streams(tp.fsdp_state(model[0]))) == 2
    assert tp.gather_streams(tp.fsdp_state(model[0])) == tp.gather_streams(tp.fsdp_state(model))


class Gather(tp.AllGather):
    """FSDP's own, counted."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, []

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls.append(async_op)
        return self.inner(output_tensor, input_tensor, group, async_op)


class Reduce(tp.ReduceScatter):
    """FSDP's own, counted."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, []

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls.append(output_tensor.dtype)
        return self.inner(output_tensor, input_tensor, group, op, async_op)


@seam("AllGather", "ReduceScatter", "all_gather_of", "reduce_scatter_of", "set_async_gather")
def _collectives() -> None:
    """In a group of two, because FSDP calls none in a group of one."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=tp.FakeStore(), rank=0, world_size=2)
    model = sharded()
    unit, group = unit_of(model)
    gather, reduce = Gather(tp.all_gather_of(group)), Reduce(tp.reduce_scatter_of(group))
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(reduce)
    tp.set_async_gather(unit, True)
    model(torch.ones(1, 4)).sum().backward()
    assert tp.all_gather_of(group) is gather and tp.reduce_scatter_of(group) is reduce
    assert gather.calls[:1] == [True] and reduce.calls == [torch.float32]


@seam("is_hybrid", "all_reduce_group", "all_reduce_hook", "partial_reduction")
def _hybrid() -> None:
    _, group = unit_of(sharded())
    assert not tp.is_hybrid(group) and tp.partial_reduction(group) is None
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(4, 4), mesh=both)
    (group,) = tp.parameter_groups(model)
    assert tp.is_hybrid(group) and tp.all_reduce_group(group).size() == 1 and tp.all_reduce_hook(group) is None
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(seen.append)
    assert tp.all_reduce_hook(group) is not None
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 4)).sum().backward()
    partly = tp.partial_reduction(group)
    assert partly is not None and partly.numel() == 20 and not seen
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1 and seen[0].numel() == 20 and tp.partial_reduction(group) is None


@seam("gradient_dtype")
def _dtype() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model(torch.ones(1, 4)).sum().backward()
    assert tp.gradient_dtype(unit_of(model)[1]) == torch.float32


@seam("unsharded_parameter")
def _unsharded() -> None:
    model = sharded()
    (weight, _) = unit_of(model)[1].fsdp_params
    assert tp.unsharded_parameter(weight) is None
    model[0].unshard()
    assert tp.unsharded_parameter(weight) is model[0].weight and not isinstance(model[0].weight, DTensor)


@seam("owners_of")
def _owners() -> None:
    model = sharded()
    owners = tp.owners_of(unit_of(model)[1].fsdp_params[0])
    assert owners.module is model[0] and owners.param_name == "weight"
    assert owners.shared_modules == [] and owners.shared_param_names == []


@seam("replace_shard")
def _replace() -> None:
    model = sharded()
    weight = unit_of(model)[1].fsdp_params[0]
    value, asked = torch.randn(4, 4), []
    stub: Any = torch.empty(1).expand(4, 4)

    def pre_all_gather(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        asked.append(tuple(size))
        return (value,), None

    def post_all_gather(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], ())

    stub.fsdp_pre_all_gather, stub.fsdp_post_all_gather = pre_all_gather, post_all_gather
    tp.replace_shard(weight, stub, stub.as_strided((16,), (0,)))
    model[0].unshard()
    assert torch.equal(model[0].weight.detach(), value) and asked == [(4, 4)]


@seam("fsdp_module_name")
def _module_name() -> None:
    model = sharded()
    model(torch.ones(1, 4))
    assert tp.fsdp_module_name(unit_of(model)[1]) == "0" and tp.fsdp_module_name(model) == ""


@seam("finish_backward")
def _finish() -> None:
    """Gradients that come in after FSDP last looked are reduced, and the next step is as ever."""
    model, plain = sharded(reshard_after_forward=False), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
    for times in (1, 2):
        model.set_is_last_backward(False)
        model(torch.ones(1, 4)).sum().backward()
        model.set_is_last_backward(True)
        for unit in model:
            for group in tp.parameter_groups(unit):
                group.post_backward()
        tp.finish_backward(model)
        plain(torch.ones(1, 4)).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad), times


@seam("leave_integers_alone")
def _integers() -> None:
    if tp.TORCH < (2, 12):
        tp.leave_integers_alone()
    layer = nn.Linear(4, 4)
    layer.codes = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    model: Any = fully_shard(layer, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model(torch.ones(1, 4)).sum().backward()
    model.unshard()
    assert model.codes.dtype == torch.uint8 and model.codes.tolist() == list(range(8))
    assert model.weight.dtype == torch.bfloat16


@seam("checkpoint", "is_recomputed")
def _recompute() -> None:
    model, calls = sharded(recompute=True), []
    assert tp.is_recomputed(model[0]) and not tp.is_recomputed(model)
    assert hasattr(tp.checkpoint.state(model[0]), "enable_hook")
    model[0].register_forward_pre_hook(lambda *_: calls.append(tp.in_backward()))
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert calls == [False, True]


# ---------------------------------------------------------------- torch: pipelines, checkpoints, compiler, memory


@seam("stage_backward_input", "stage_backward_weight")
def _split() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    given = torch.randn(2, 4, requires_grad=True)
    wanted = torch.autograd.grad(model(given).sum(), (given, *model.parameters()))
    out = model(given)
    inputs, groups = tp.stage_backward_input([out], [torch.ones_like(out)], [given], iter(model.parameters()))
    assert torch.allclose(inputs[0], wanted[0]) and all(p.grad is None for p in model.parameters())
    tp.stage_backward_weight(iter(model.parameters()), groups, retain_graph=True)
    for parameter, gradient in zip(model.parameters(), wanted[1:], strict=True):
        assert torch.allclose(parameter.grad, gradient)


@seam("flatten_state_dict", "DistWrapper", "StorageInfo", "index_path")
def _checkpoints() -> None:
    import tempfile

    from torch.distributed.checkpoint.filesystem import FileSystemReader

    one = torch.ones(1)
    assert tp.flatten_state_dict({"a": {"b": 1}, "c": [one]})[0] == {"a.b": 1, "c.0": one}
    ranks = tp.DistWrapper(dist.group.WORLD, True, 0)
    assert ranks.is_coordinator and ranks.rank == 0
    assert ranks.reduce_scatter("plan", lambda: 2, lambda all: [x + 1 for x in all]) == 3
    assert ranks.all_reduce("write", lambda: 2, lambda all: sum(all)) == 2 and ranks.all_gather_object(5) == [5]
    info = tp.StorageInfo("file", 3, 4)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 4)
    with tempfile.TemporaryDirectory() as folder:
        reader = FileSystemReader(folder)
        assert Path(tp.index_path(reader, None)) == Path(folder) / ".metadata"
        assert Path(tp.index_path(reader, 2)).name == "__2.metadata" and reader.load_id


@seam("flight_recording")
def _recorder() -> None:
    dist.all_reduce(torch.ones(3))
    found = tp.flight_recording(False)
    fields = {
        "process_group",
        "collective_seq_id",
        "p2p_seq_id",
        "is_p2p",
        "profiling_name",
        "time_created_ns",
        "state",
    }
    assert found and all(fields | {"retired"} <= set(entry) for entry in found)
    names = dir(torch._C._distributed_c10d)
    assert ("_dump_nccl_trace_json" in names) == dist.is_nccl_available()


@seam("TorchDynamoException", "default_cache_dir", "has_triton")
def _compiler() -> None:
    assert issubclass(tp.TorchDynamoException, Exception) and isinstance(tp.has_triton(), bool)
    assert "torchinductor" in tp.default_cache_dir()


@seam("record_memory_history", "dump_memory_snapshot")
def _memory() -> None:
    """What a machine without a GPU can hold them to: that they are called as they are declared."""
    signature = inspect.signature(torch.cuda.memory._record_memory_history)
    signature.bind(max_entries=5)
    signature.bind(enabled=None)
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("file")


# ---------------------------------------------------------------- transformers and datasets


def tiny(kind: str = "llama", **sizes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small | sizes))


@seam("is_pretrained", "is_config", "unsplittable", "tensor_plan", "is_stateful")
def _models() -> None:
    model = tiny()
    assert hf.is_pretrained(model) and hf.is_config(model.config) and not hf.is_pretrained(nn.Linear(1, 1))
    assert not hf.is_config(SimpleNamespace(num_heads=1)) and not hf.is_config(None)
    assert hf.unsplittable(model) == {"LlamaDecoderLayer"} and hf.unsplittable(nn.Linear(1, 1)) == set()
    assert hf.tensor_plan(model)["model.layers.*.self_attn.q_proj"] == "colwise"
    assert hf.tensor_plan(nn.Linear(1, 1)) == {}
    assert not hf.is_stateful(model)
    from transformers import MambaConfig, MambaForCausalLM

    assert hf.is_stateful(MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16)))


@seam("attention_of", "set_attention_of")
def _attention_name() -> None:
    from transformers import AttentionInterface

    model = tiny()
    assert hf.attention_of(model.config) == "sdpa"
    calls: list[Any] = []
    AttentionInterface.register("seam", lambda *args, **kwargs: calls.append(1) or AttentionInterface()["sdpa"](*args))
    hf.set_attention_of(model.config, "seam")
    assert hf.attention_of(model.model.layers[0].self_attn.config) == "seam"
    with torch.no_grad():
        model.model.layers[0].self_attn(
            torch.ones(1, 3, 8), position_embeddings=(torch.ones(1, 3, 4), torch.zeros(1, 3, 4)), attention_mask=None
        )
    assert calls == [1]


@seam("experts_of", "set_experts_of", "apply_gate", "grouped_product_as")
def _experts() -> None:
    model = tiny("mixtral", num_local_experts=2)
    stack = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    inside = torch.randn(3, 2 * stack.gate_up_proj.shape[-2] // 2)
    gate, up = inside.chunk(2, -1)
    assert torch.allclose(hf.apply_gate(stack, inside), stack.act_fn(gate) * up)
    calls: list[str] = []

    def change(own: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append("grouped")
            return own(*args, **kwargs)

        return counted

    tokens, index, weights = torch.randn(3, 8), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    found = {}
    for name in ("eager", "grouped_mm"):
        hf.set_experts_of(stack.config, name)
        assert hf.experts_of(stack.config) == name
        with hf.grouped_product_as(change), torch.no_grad():
            found[name] = stack(tokens, index, weights)
        assert bool(calls) == (name == "grouped_mm")
    assert torch.allclose(found["eager"], found["grouped_mm"], atol=1e-5)
    assert stack.has_gate and stack.has_bias is False and stack.num_experts == 2


@seam("from_config", "init_weights")
def _weights() -> None:
    model = tiny()
    again = hf.from_config(type(model), model.config)
    assert type(again) is type(model)
    layer = nn.Linear(64, 64)
    nn.init.constant_(layer.bias, 3.0)
    hf.init_weights(model, layer)
    assert layer.bias.abs().max() == 0 and 0.01 < layer.weight.std() < 0.04


@seam("set_conversions")
def _conversions() -> None:
    """`save_pretrained` undoes them: the stack of experts comes out as single matrices again."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    model = tiny("mixtral", num_local_experts=2)
    state = model.state_dict()
    rules = get_model_conversion_mapping(model, add_legacy=False)
    hf.set_conversions(model, [])
    assert set(revert_weight_conversion(model, dict(state))) == set(state)
    hf.set_conversions(model, rules)
    assert any("experts.1.w1" in name for name in revert_weight_conversion(model, dict(state)))


@seam("dataset_fingerprint")
def _fingerprint() -> None:
    from datasets import Dataset

    one = Dataset.from_dict({"a": [1, 2]})
    assert hf.dataset_fingerprint(one) != hf.dataset_fingerprint(one.map(lambda row: {"a": row["a"] + 1}))


@pytest.mark.parametrize("name", sorted(SEAMS))
def test_seam(name: str) -> None:
    SEAMS[name]()


# ---------------------------------------------------------------- nothing private elsewhere

# Private attributes of other libraries' objects that may be used anywhere, and why.
ALLOWED = {
    "_parameters": "of nn.Module: known to every version and half of torch's users",
    "_buffers": "of nn.Module",
    "_modules": "of nn.Module",
    "_apply": "of nn.Module",
    "_asdict": "of named tuples, where it is public",
    "_exit": "of os, where it is public",
    "_current_frames": "of sys, where it is public",
    "_run_exitfuncs": "of atexit: Python's own",
}
LIBRARIES = ("torch", "transformers")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a file gives to what is its own: functions, fields, and attributes that it sets on `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in (inner for one in targets for inner in ast.walk(one)):
            if isinstance(target, ast.Name):
                found.add(target.id)
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                found.add(target.attr)
    return {name for name in found if is_private(name)}


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private imports of the libraries, and private attributes that nothing of ours is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            for alias in node.names:
                if any(map(is_private, [*(node.module or "").split("."), alias.name])):
                    yield f"{node.lineno}: from {node.module} import {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES and any(map(is_private, alias.name.split("."))):
                    yield f"{node.lineno}: import {alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | set(ALLOWED):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own | set(ALLOWED):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_nothing_private_is_used_elsewhere() -> None:
    trees = {file: ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}
    compat = SOURCE / "core" / "compat"
    seams = {
        n.attr for f, t in trees.items() if f.parent == compat for n in ast.walk(t) if isinstance(n, ast.Attribute)
    }
    everywhere = {name for f, t in trees.items() if f.parent != compat for name in own_names(t)}
    found = []
    for file, tree in trees.items():
        if file.parent != compat:
            # A name that is also a seam's counts as ours only in the file that defines it.
            own = own_names(tree) | (everywhere - seams)
            found += [f"{file.relative_to(SOURCE)}:{use}" for use in private_uses(tree, own)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map", "from torch.distributed.checkpoint.utils import _DistWrapper",
        "import torch._functorch.config", "from transformers.x import _y", "group._is_hsdp", "torch._foreach_add_(x)",
        "getattr(state, '_comm_ctx', None)", "hasattr(config, '_attn_implementation')", "x = tensor._local_tensor",
    ],
)  # fmt: skip
def test_the_search_finds(line: str) -> None:
    assert list(private_uses(ast.parse(line), set()))
