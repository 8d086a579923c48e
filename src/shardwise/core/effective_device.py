"""Which device's code path a tensor takes.

A rehearsal computes on fake tensors, which lie on the CPU (a fake GPU's autograd needs a build with CUDA) but stand for
a GPU's. Code that has a path of its own for GPUs asks here, so that what is rehearsed is what will run.
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
    """`cuda` or `cpu`: where a tensor lies, or what it stands for."""
    device = where.device if isinstance(where, torch.Tensor) else where
    return _acted or device.type


def stands_in() -> bool:
    """Whether fake tensors stand for a GPU's at the moment: no kernel can be launched, but all others' paths hold."""
    return _acted == "cuda"


def compiled(
    function: Callable[..., Any], light: bool = False, failures: list[str] | None = None
) -> Callable[..., Any]:
    """By inductor; a rehearsal launches no kernels, but keeps what compiled code keeps.

    `light`: what costs a pass over memory at most (norms, activation functions) is computed again in backward even
    where a product there wants all of it; of itself the compiler keeps such inputs of products. `failures`: a list that
    blocks share; what the compiler cannot take is told once and computed as it is written.
    """
    if _acted is None:
        _keep_compiled()
    made: Callable[..., Any] = torch.compile(
        function, backend="inductor" if _acted is None else "aot_eager_decomp_partition"
    )
    if light:
        made = _lightly(made)
    return made if failures is None else _or_as_written(made, function, failures)


def ready_compiler() -> None:
    """Imports what `compiled` does on its first call, some 3 s: once here rather than in each process forked later."""
    for name in ("_dynamo", "_functorch.aot_autograd", "_inductor.decomposition", "_inductor.distributed_autotune"):
        with suppress(ImportError):  # a version that has it elsewhere finds it by itself
            import_module(f"torch.{name}")


def _lightly(made: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):  # read when the graph is made
            return made(*args, **kwargs)

    return call


def _or_as_written(made: Callable[..., Any], function: Callable[..., Any], failures: list[str]) -> Callable[..., Any]:
    from shardwise.core.compat.torch_private import TorchDynamoException

    def call(*args: Any, **kwargs: Any) -> Any:
        if not failures:
            try:
                return made(*args, **kwargs)
            except TorchDynamoException as error:
                failures.append(" ".join(str(error).split("\n")[:2]))
                words = "the compiler does not take this model's blocks, which run as they are written (compile: false)"
                warnings.warn(f"{words}: {failures[0]}", stacklevel=2)
        return function(*args, **kwargs)

    return call


def as_written(run_is_compiled: bool) -> AbstractContextManager[Any]:
    """Within it compiled blocks run as they are written: for a look at a few tokens, which would be compiled for."""
    return torch.compiler.set_stance("force_eager") if run_is_compiled else nullcontext()


def _keep_compiled() -> None:
    """What was compiled is kept where it outlives a restart; torch by itself takes the folder of temporary files.

    A folder that the user named stays.
    """
    from shardwise.core.compat.torch_private import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_root() / "compiled")


def indices_where(mask: torch.Tensor) -> torch.Tensor:
    """The places of a flat mask that are set; of a fake one, which has no values, all."""
    if isinstance(mask, FakeTensor):
        return torch.arange(mask.numel(), device=mask.device)
    return mask.nonzero().flatten()


def count_of(step: torch.Tensor) -> int:
    """A counter that a tensor holds; of a fake one, which has no value, the first."""
    return 1 if isinstance(step, FakeTensor) else int(step.item())


def table_of(counts: torch.Tensor, total: int) -> list[list[list[int]]]:
    """Tables of counts as lists; of fake ones, which have no values, tables in which all are about alike."""
    if not isinstance(counts, FakeTensor):
        return counts.tolist()  # type: ignore[no-any-return]
    tables, rows, columns = counts.shape
    each, more = divmod(total, rows * columns)
    even = [[each + (row * columns + column < more) for column in range(columns)] for row in range(rows)]
    return [even for _ in range(tables)]


def on_host(size: int) -> torch.Tensor:
    """Bytes of a GPU's host, where fake tensors stand for both."""
    made = torch.empty(size, dtype=torch.uint8)
    _HOST.add(made.untyped_storage())
    return made


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for one in host memory."""
    return tensor.untyped_storage() in _HOST


@contextmanager
def acting(kind: str) -> Iterator[None]:
    """Within it, CPU tensors stand for those of another kind of device."""
    global _acted
    before, _acted = _acted, kind
    try:
        yield
    finally:
        _acted = before


CAPABILITY = (8, 9)  # of NVIDIA's GPUs that have such products


def has_fp8_matmul(device: torch.device) -> bool:
    """Whether a device has such products (a CPU's are computed in fp32)."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= CAPABILITY
