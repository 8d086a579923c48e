"""Which device's code path a tensor takes.

A rehearsal computes on fake tensors, which lie on the CPU (a fake GPU's autograd needs a build with CUDA) but represent
a GPU's. Code with a separate GPU path checks here, so that the rehearsal runs what training will run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch

from shardwise.core.cache import cache_root
from shardwise.core.compat.torch_private import FakeTensor, functorch_config

_HOST: WeakSet[torch.UntypedStorage] = WeakSet()
_acted: str | None = None  # no ContextVar: a compiled block asks too, and the compiler knows none


def effective_device(where: torch.Tensor | torch.device) -> str:
    """`cuda` or `cpu`: the device of a tensor, or the one it represents."""
    device = where.device if isinstance(where, torch.Tensor) else where
    return _acted or device.type


def stands_in() -> bool:
    """Whether fake tensors currently represent a GPU's: no kernel can be launched, but GPU code paths apply."""
    return _acted == "cuda"


def compiled(
    function: Callable[..., Any], light: bool = False, failures: list[str] | None = None
) -> Callable[..., Any]:
    """Compiles a function with inductor; a rehearsal launches no kernels, but saves the same activations.

    `light`: operations that cost at most a pass over memory (norms, activation functions) are recomputed in backward
    even where a matmul there needs the full result; by default the compiler saves such inputs of matmuls. `failures`: a
    list shared by blocks; a function that cannot be compiled is reported once and runs in eager mode.
    """
    if _acted is None:
        _use_compile_cache()
    wrapped: Callable[..., Any] = torch.compile(
        function, backend="inductor" if _acted is None else "aot_eager_decomp_partition"
    )
    if light:
        wrapped = _recompute_cheap_ops(wrapped)
    return wrapped if failures is None else _with_eager_fallback(wrapped, function, failures)


def ready_compiler() -> None:
    """Imports the compiler in advance, some 3 s: once here rather than in each process forked later."""
    for name in ("_dynamo", "_functorch.aot_autograd", "_inductor.decomposition", "_inductor.distributed_autotune"):
        with suppress(ImportError):  # a version that has it elsewhere finds it by itself
            import_module(f"torch.{name}")


def _recompute_cheap_ops(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):  # read when the graph is made
            return wrapped(*args, **kwargs)

    return call


def _with_eager_fallback(
    wrapped: Callable[..., Any], function: Callable[..., Any], failures: list[str]
) -> Callable[..., Any]:
    from shardwise.core.compat.torch_private import TorchDynamoException

    def call(*args: Any, **kwargs: Any) -> Any:
        if not failures:
            try:
                return wrapped(*args, **kwargs)
            except TorchDynamoException as error:
                failures.append(" ".join(str(error).split("\n")[:2]))
                message = (
                    "the compiler does not take this model's blocks, which run as they are written (compile: false)"
                )
                warnings.warn(f"{message}: {failures[0]}", stacklevel=2)
        return function(*args, **kwargs)

    return call


def as_written(run_is_compiled: bool) -> AbstractContextManager[Any]:
    """Context in which compiled blocks run in eager mode, for a few tokens not worth compiling for."""
    return torch.compiler.set_stance("force_eager") if run_is_compiled else nullcontext()


def _use_compile_cache() -> None:
    """Stores compiled code in our cache, where it outlives a reboot; torch's default is the temporary folder.

    A folder that the user named stays.
    """
    from shardwise.core.compat.torch_private import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_root() / "compiled")


def indices_where(mask: torch.Tensor) -> torch.Tensor:
    """Indices of the set elements of a flat mask; all of them for a fake one, which has no values."""
    if isinstance(mask, FakeTensor):
        return torch.arange(mask.numel(), device=mask.device)
    return mask.nonzero().flatten()


def count_of(step: torch.Tensor) -> int:
    """Value of a counter tensor; 1 for a fake one, which has no value."""
    return 1 if isinstance(step, FakeTensor) else int(step.item())


def table_of(counts: torch.Tensor, total: int) -> list[list[list[int]]]:
    """Tables of counts as lists; for fake ones, which have no values, about uniform counts."""
    if not isinstance(counts, FakeTensor):
        return counts.tolist()  # type: ignore[no-any-return]
    tables, rows, columns = counts.shape
    each, more = divmod(total, rows * columns)
    even = [[each + (row * columns + column < more) for column in range(columns)] for row in range(rows)]
    return [even for _ in range(tables)]


def on_host(size: int) -> torch.Tensor:
    """Bytes in a GPU's host memory, where fake tensors represent both."""
    tensor = torch.empty(size, dtype=torch.uint8)
    _HOST.add(tensor.untyped_storage())
    return tensor


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor represents one in host memory."""
    return tensor.untyped_storage() in _HOST


@contextmanager
def acting(kind: str) -> Iterator[None]:
    """Context in which CPU tensors represent those of another kind of device."""
    global _acted
    before, _acted = _acted, kind
    try:
        yield
    finally:
        _acted = before


CAPABILITY = (8, 9)  # of NVIDIA's GPUs that have such products


def has_fp8_matmul(device: torch.device) -> bool:
    """Whether a device has fp8 matmuls (a CPU's are computed in fp32)."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= CAPABILITY
