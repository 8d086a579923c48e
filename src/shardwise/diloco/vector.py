"""What a worker trains, over its ranks: read and written by shards, whole on the main rank alone, a tensor at a time.

Ranks say once which elements of each tensor they hold. To read, the main rank takes each element from the first rank
that has it; to write, it gives every rank its own. All of it goes by the host: a GPU never holds more than its shards.
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
    """The trained parameters of a worker; every rank calls every method."""

    def __init__(self, parts: TrainState) -> None:
        self._sharded, self._optimizer, self._world = parts.sharded, parts.optimizer, parts.world
        self._parameters = dict(sorted(parts.sharded.parameters.items()))
        self.plan = VectorPlan(tuple((name, tuple(p.shape)) for name, p in self._parameters.items()))
        mine = {name: _span(p) for name, p in self._parameters.items()}
        self._spans: list[dict[str, Span]] = [mine]
        if self._world.size > 1:
            self._spans = [{} for _ in range(self._world.size)]
            dist.all_gather_object(self._spans, mine, group=self._world.control)

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's elements of each tensor, flat, fp32, on the host."""
        rows = self._masters()
        for name, parameter in self._parameters.items():
            found = rows[name].read() if name in rows else local_of(parameter)
            # A copy in any case: on a CPU this would be the parameter itself.
            yield name, found.detach().to("cpu", torch.float32, copy=True).flatten()

    @torch.no_grad()
    def write(self, name: str, flat: torch.Tensor) -> None:
        """This rank's elements of a tensor; `written` when all are."""
        rows, target = self._masters(), local_of(self._parameters[name])
        if name in rows:
            rows[name].write(0, flat.view(rows[name].read().shape))
        else:
            target.copy_(flat.view(target.shape))

    def written(self) -> None:
        """Copies of the parameters are out of date."""
        self._sharded.updated()

    def gather(self, name: str, local: torch.Tensor) -> torch.Tensor | None:
        """A whole tensor, flat, on the main rank, from each rank's elements."""
        world, group = self._world, self._world.control
        if world.size == 1:
            return local
        takes = self._takes(name)
        if not world.is_main:
            if world.rank in takes:
                dist.send(local, 0, group=group)
            return None
        whole = torch.empty(max(stop for _, stop in takes.values()))
        for rank, (start, stop) in takes.items():
            if rank == 0:
                whole[start:stop] = local
            else:
                came = torch.empty(stop - start)
                dist.recv(came, rank, group=group)
                whole[start:stop] = came
        return whole

    def scatter(self, name: str, whole: torch.Tensor | None) -> torch.Tensor:
        """Each rank's elements of a tensor that the main rank has whole."""
        world, group = self._world, self._world.control
        start, stop = self._spans[world.rank][name]
        if world.is_main:
            assert whole is not None
            for rank in range(1, world.size):
                first, end = self._spans[rank][name]
                if end > first:
                    dist.send(whole[first:end].contiguous(), rank, group=group)
            return whole[start:stop]
        mine = torch.empty(stop - start)
        if stop > start:
            dist.recv(mine, 0, group=group)
        return mine

    def _takes(self, name: str) -> dict[int, Span]:
        """From which rank which elements come: each once."""
        found: dict[int, Span] = {}
        for rank, spans in enumerate(self._spans):
            start, stop = spans[name]
            if stop > start and (start, stop) not in found.values():
                found[rank] = (start, stop)
        return found

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


def base_of(parts: TrainState) -> dict[str, str]:
    """What must be the same for all workers besides what is trained, as hashes by the name that a message uses.

    Of frozen parameters the main rank's first values are enough to tell one model from another.
    """
    model: Any = parts.sharded.model
    job = parts.job
    config = {k: v for k, v in model.config.to_dict().items() if _tells(k)}
    frozen = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            frozen.update(f"{name} {tuple(parameter.shape)}".encode())
            if job.run.offload.parameters == "none":
                few = local_of(parameter).flatten()[:SAMPLED].cpu()
                few = few.bfloat16().float() if few.is_floating_point() else few  # stored in fp32 here, bf16 there
                frozen.update(str(few.tolist()).encode())
    return {
        "model configuration": _hash(json.dumps(config, sort_keys=True, default=str)),
        "base model": frozen.hexdigest()[:16],
        "tokenizer": template_fingerprint(job.tokenizer).partition("-")[2],
    }


def _tells(key: str) -> bool:
    named = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
    return not key.startswith("_") and key not in named and not key.endswith("_token_id")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
