"""A worker's trained parameters over its ranks: sharded, and full on the main rank only, one tensor at a time.

Ranks exchange once which elements of each tensor they hold. To read, the main rank receives each element from the first
rank that has it; to write, it sends every rank its own. All of it goes through the host: a GPU never holds more than
its shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.fingerprint import template_fingerprint
from shardwise.diloco.codec import VectorPlan
from shardwise.optim.shards import first_row, local_of
from shardwise.parallel.offload.checkpoint_entries import masters
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.train.setup import TrainState

Span = tuple[int, int]
SAMPLED = 16  # values of each frozen tensor that tell one base from another


class TrainedVector:
    """The trained parameters of a worker; all methods are collective."""

    def __init__(self, state: TrainState) -> None:
        self._sharded = state.sharded
        self._optimizer = state.optimizer
        self._world = state.world
        self._parameters = dict(sorted(state.sharded.parameters.items()))
        self.plan = VectorPlan(tuple((name, tuple(p.shape)) for name, p in self._parameters.items()))
        spans = {name: _span(p) for name, p in self._parameters.items()}
        self._spans: list[dict[str, Span]] = [spans]
        if self._world.size > 1:
            self._spans = [{} for _ in range(self._world.size)]
            dist.all_gather_object(self._spans, spans, group=self._world.control)

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's elements of each tensor, flat, fp32, on the host."""
        rows = self._masters()
        for name, parameter in self._parameters.items():
            values = rows[name].read() if name in rows else local_of(parameter)
            # A copy in any case: on a CPU this would be the parameter itself.
            yield name, values.detach().to("cpu", torch.float32, copy=True).flatten()

    @torch.no_grad()
    def write(self, name: str, flat: torch.Tensor) -> None:
        """Writes this rank's elements of a tensor; call `written` after all of them."""
        rows = self._masters()
        target = local_of(self._parameters[name])
        if name in rows:
            rows[name].write([0], flat.view(rows[name].read().shape))
        else:
            target.copy_(flat.view(target.shape))

    def written(self) -> None:
        """Refreshes copies of the parameters."""
        self._sharded.updated()

    def gather(self, name: str, local: torch.Tensor) -> torch.Tensor | None:
        """Gathers a full tensor, flat, on the main rank."""
        world = self._world
        group = self._world.control
        if world.size == 1:
            return local
        takes = self._sources_of(name)
        if not world.is_main:
            if world.rank in takes:
                dist.send(local, 0, group=group)
            return None
        full = torch.empty(max(stop for _, stop in takes.values()))
        for rank, (start, stop) in takes.items():
            if rank == 0:
                full[start:stop] = local
            else:
                received = torch.empty(stop - start)
                dist.recv(received, rank, group=group)
                full[start:stop] = received
        return full

    def scatter(self, name: str, full: torch.Tensor | None) -> torch.Tensor:
        """Scatters a full tensor from the main rank; returns this rank's elements."""
        world = self._world
        group = self._world.control
        start, stop = self._spans[world.rank][name]
        if world.is_main:
            assert full is not None
            for rank in range(1, world.size):
                first, end = self._spans[rank][name]
                if end > first:
                    dist.send(full[first:end].contiguous(), rank, group=group)
            return full[start:stop]
        received = torch.empty(stop - start)
        if stop > start:
            dist.recv(received, 0, group=group)
        return received

    def _sources_of(self, name: str) -> dict[int, Span]:
        """The ranks to receive from, with their elements, each element once."""
        sources: dict[int, Span] = {}
        for rank, spans in enumerate(self._spans):
            start, stop = spans[name]
            if stop > start and (start, stop) not in sources.values():
                sources[rank] = (start, stop)
        return sources

    def _masters(self) -> dict[str, Any]:
        if not isinstance(self._optimizer, OffloadedOptimizer):
            return {}
        self._optimizer.finish()
        return dict(masters(self._optimizer))


def _span(parameter: torch.Tensor) -> Span:
    """First and one past the last element that this rank holds."""
    each = parameter.numel() // parameter.shape[0] if parameter.ndim else 1
    start = first_row(parameter) * each
    return start, start + local_of(parameter).numel()


def base_of(state: TrainState) -> dict[str, str]:
    """Hashes of what all workers must share besides the trained tensors, by the name used in messages.

    Of frozen parameters the main rank's first values are enough to distinguish models.
    """
    model: Any = state.sharded.model
    resolved = state.job
    config = {k: v for k, v in model.config.to_dict().items() if _is_relevant(k)}
    frozen = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            frozen.update(f"{name} {tuple(parameter.shape)}".encode())
            if resolved.run.offload.parameters == "none":
                few = local_of(parameter).flatten()[:SAMPLED].cpu()
                few = few.bfloat16().float() if few.is_floating_point() else few  # stored in fp32 here, bf16 there
                frozen.update(str(few.tolist()).encode())
    return {
        "model configuration": _hash(json.dumps(config, sort_keys=True, default=str)),
        "base model": frozen.hexdigest()[:16],
        "tokenizer": template_fingerprint(resolved.tokenizer).partition("-")[2],
    }


def _is_relevant(key: str) -> bool:
    ignored = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
    return not key.startswith("_") and key not in ignored and not key.endswith("_token_id")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
