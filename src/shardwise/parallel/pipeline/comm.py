"""Tensors between pipeline stages, exchanged in the order of the rank's program.

Both directions share one group, so that NCCL runs a rank's exchanges one after the other, in the
order in which they were posted: see [Note: one order of messages] in programs.py for why this
cannot deadlock. Exchanges have a stream of their own: a receive does not wait for what is being
computed, only a send for the action that produced it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from shardwise.distributed.mesh import connect
from shardwise.distributed.shared_gpu import goes_by_host
from shardwise.parallel.pipeline.programs import Exchange, Message, Way, source_of
from shardwise.parallel.pipeline.stage import ShardLayout, StageInput

Ports = tuple[StageInput, ...]


@dataclass(frozen=True)
class StageLinks:
    """Groups of one pipeline: for tensors, descriptions of tensors, and sums (by their ranks)."""

    tensors: dist.ProcessGroup
    descriptions: dist.ProcessGroup
    sums: dict[tuple[int, ...], dist.ProcessGroup]


def make_links(
    group: dist.ProcessGroup, device: torch.device, sums: Sequence[tuple[int, ...]] = ()
) -> StageLinks:
    """Makes and connects the groups of all pipelines of the run.

    Every rank calls it with its own `group` and the same `sums`.
    """
    own_ranks = tuple(dist.get_process_group_ranks(group))
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own_ranks)
    backend = dist.get_backend(group)
    host_backend = "fake" if backend == "fake" else "gloo"
    tensors: dist.ProcessGroup | None = None
    descriptions: dist.ProcessGroup | None = None
    own_sums: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(set(pipelines)):
        tensor_group = dist.new_group(list(ranks), backend=backend)
        description_group = dist.new_group(list(ranks), backend=host_backend)
        if ranks == own_ranks:
            tensors = tensor_group
            descriptions = description_group
        for members in sorted(set(sums)):
            sum_group = dist.new_group([ranks[i] for i in members], backend=backend)
            if ranks == own_ranks and dist.get_rank(group) in members:
                own_sums[members] = sum_group
    assert tensors is not None and descriptions is not None
    connect([tensors, *own_sums.values()], device, neighbours=True)
    return StageLinks(tensors, descriptions, own_sums)


def shapes_of(value: Any) -> Hashable:
    """What two micro-batches have in common if the same shapes pass through the model for both."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, shapes_of(entry)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(shapes_of(entry) for entry in value)
    if is_dataclass(value):
        return tuple((f.name, shapes_of(getattr(value, f.name))) for f in fields(value))
    return value is None


def encode_ports(ports: Ports) -> bytes:
    """As JSON: what comes from another process is data and no pickle, which could run code."""
    rows = []
    for port in ports:
        layout = None
        if port.layout is not None:
            placements = port.layout.placements
            assert all(type(placement) in (Replicate, Shard) for placement in placements), port
            dims = [
                placement.dim if isinstance(placement, Shard) else None for placement in placements
            ]
            layout = [port.layout.axes, dims, port.layout.shape, port.layout.stride]
        dtype = str(port.dtype).removeprefix("torch.")
        rows.append([port.place, port.shape, dtype, port.grad, layout])
    return json.dumps(rows).encode()


def decode_ports(data: bytes) -> Ports:
    """What `encode_ports` wrote."""
    ports = []
    for (argument, which), shape, name, grad, encoded_layout in json.loads(data):
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype), name
        layout = None
        if encoded_layout is not None:
            axes, dims, full_shape, stride = encoded_layout
            placements = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
            layout = ShardLayout(tuple(axes), placements, tuple(full_shape), tuple(stride))
        ports.append(StageInput((argument, which), tuple(shape), dtype, grad, layout))
    return tuple(ports)


@dataclass(frozen=True)
class _PendingTransfer:
    """Tensors under way, and what to wait for."""

    tensors: list[torch.Tensor]
    works: list[Any]
    ports: Ports = ()

    @property
    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_Posted = tuple[dict[Message, _PendingTransfer], Message, Ports, list[torch.Tensor]]


class StageComm:
    """The messages of one step of one rank; `known` are boundaries' ports, kept between steps."""

    def __init__(
        self,
        links: StageLinks,
        rank: int,
        owners: Sequence[int],
        keys: Sequence[Hashable],
        known: dict[Hashable, Ports],
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._links = links
        self._rank = rank
        self._owners = owners
        self._keys = keys
        self._known = known
        self._device = device
        self._stream = stream
        self._buffers_on = torch.device("cpu") if goes_by_host(links.tensors) else device
        self._outgoing: dict[Message, Sequence[torch.Tensor]] = {}
        self._sending: dict[Message, _PendingTransfer] = {}
        self._arriving: dict[Message, _PendingTransfer] = {}
        self._descriptions: list[tuple[Any, torch.Tensor]] = []
        self._gradient_ports: dict[tuple[int, int], Ports] = {}  # of gradients that will arrive

    def send(self, chunk: int, micro: int, ports: Ports, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the input of a chunk; it is sent to its owner when the program says so."""
        key = self._key(chunk, micro)
        if key not in self._known:
            self._known[key] = ports
            self._describe(ports, self._owners[chunk])
        elif self._known[key] != ports:
            raise RuntimeError(
                f"chunk {chunk} is given {ports}, before it was {self._known[key]}: "
                "micro-batches of the same shapes must pass the same tensors"
            )
        self._gradient_ports[chunk - 1, micro] = ports
        self._outgoing[Message("forward", chunk, micro)] = tensors

    def send_back(self, chunk: int, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """Takes the gradients of a chunk's output; they are sent when the program says so."""
        self._outgoing[Message("backward", chunk, micro)] = gradients

    def exchange(self, exchange: Exchange) -> None:
        """Posts sends and receives; does not wait for them."""
        operations: list[Any] = []
        pending: list[_Posted] = []
        sends = False
        for message in exchange.messages:
            ports: Ports = ()
            if self._owners[source_of(message)] == self._rank:
                peer = self._owners[message.chunk]
                outgoing = self._outgoing.pop(message)
                tensors = [t.detach().to(self._buffers_on).contiguous() for t in outgoing]
                operations += [self._operation(dist.isend, tensor, peer) for tensor in tensors]
                pending.append((self._sending, message, ports, tensors))
                sends = True
                continue
            peer = self._owners[source_of(message)]
            if (
                message.way == "forward"
                and self._key(message.chunk, message.micro) not in self._known
            ):
                self._post(operations, pending, sends)  # the description may depend on these
                operations, pending, sends = [], [], False
            ports = self._ports(message, peer)
            with self._beside():
                tensors = [self._buffer(p) for p in ports if p.grad or message.way == "forward"]
            operations += [self._operation(dist.irecv, tensor, peer) for tensor in tensors]
            pending.append((self._arriving, message, ports, tensors))
        self._post(operations, pending, sends)

    def receive(self, way: Way, chunk: int, micro: int) -> tuple[Ports, list[torch.Tensor]]:
        """The message for a chunk and a micro-batch, whose exchange was posted; waits for it."""
        arrived = self._arriving.pop(Message(way, chunk, micro))
        arrived.wait()
        if self._stream is not None:
            for tensor in arrived.tensors:
                tensor.record_stream(torch.cuda.current_stream())
        if way == "backward":  # its input has arrived, then
            sent = self._sending.pop(Message("forward", chunk + 1, micro), None)
            if sent is not None:
                sent.wait()
        return arrived.ports, [tensor.to(self._device) for tensor in arrived.tensors]

    def finish(self) -> None:
        """Waits until everything has been sent."""
        for sent in self._sending.values():
            sent.wait()
        for work, _ in self._descriptions:
            work.wait()
        self._sending.clear()
        self._descriptions.clear()

    def _key(self, chunk: int, micro: int) -> Hashable:
        return (chunk, torch.is_grad_enabled(), self._keys[micro])

    def _operation(self, kind: Any, tensor: torch.Tensor, peer: int) -> Any:
        return dist.P2POp(kind, tensor, group=self._links.tensors, group_peer=peer)

    def _buffer(self, port: StageInput) -> torch.Tensor:
        return torch.empty(port.shape, dtype=port.dtype, device=self._buffers_on)

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        """The stream of exchanges, where there are streams."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def _post(
        self,
        operations: list[Any],
        pending: list[_Posted],
        sends: bool,
    ) -> None:
        works: list[Any] = []
        if operations:
            if self._stream is not None and sends:
                self._stream.wait_stream(torch.cuda.current_stream())
            with self._beside():
                works = dist.batch_isend_irecv(operations)
        one_each = len(works) == len(operations)  # NCCL has one for all
        position = 0
        for box, message, ports, tensors in pending:
            following = position + len(tensors)
            own_works = works[position:following] if one_each else works
            box[message] = _PendingTransfer(tensors, own_works, ports)
            position = following
        if self._stream is not None:
            self._sending = {m: sent for m, sent in self._sending.items() if not sent.done}

    def _ports(self, message: Message, peer: int) -> Ports:
        if message.way == "backward":
            return self._gradient_ports.pop((message.chunk, message.micro))
        key = self._key(message.chunk, message.micro)
        if key not in self._known:
            self._known[key] = self._described(peer)
        return self._known[key]

    def _describe(self, ports: Ports, peer: int) -> None:
        data = torch.frombuffer(bytearray(encode_ports(ports)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            work = dist.isend(tensor, group=self._links.descriptions, group_dst=peer)
            self._descriptions.append((work, tensor))

    def _described(self, peer: int) -> Ports:
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, group=self._links.descriptions, group_src=peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, group=self._links.descriptions, group_src=peer)
        return decode_ports(data.numpy().tobytes())
