"""Tensors between neighbouring stages: sent without waiting, received in the order in which they were sent.

[Note: four groups] NCCL runs the messages of two ranks in one group one after the other, each until its partner has
come to it. Forwards and backwards, and messages to higher and to lower ranks (chunks in rounds or in a V go both ways),
have groups of their own, so that two ranks never wait for each other. Within a group each pair has one direction, and
the receiver, which knows the sender's order, asks for messages in that order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from shardwise.distributed.shared_gpu import goes_by_host
from shardwise.parallel.pipeline.schedule import Orders
from shardwise.parallel.pipeline.stage import ShardLayout, StageInput

Way = Literal["forward", "backward"]
Message = tuple[Way, int, int]  # which way, the chunk it is for, the micro-batch


@dataclass(frozen=True)
class StageLinks:
    """Groups of one pipeline: for messages, by way and whether to a higher rank; and for sums, by the ranks in them."""

    messages: dict[tuple[Way, bool], dist.ProcessGroup]
    sums: dict[tuple[int, ...], dist.ProcessGroup]


def make_links(group: dist.ProcessGroup, sums: Sequence[tuple[int, ...]] = ()) -> StageLinks:
    """Makes the groups of all pipelines of the run: every rank calls it with its own and the same `sums`."""
    mine = tuple(dist.get_process_group_ranks(group))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    messages: dict[tuple[Way, bool], dist.ProcessGroup] = {}
    summing: dict[tuple[int, ...], dist.ProcessGroup] = {}
    backend = dist.get_backend(group)
    for ranks in sorted(set(gathered)):
        ways: tuple[Way, ...] = ("forward", "backward")
        for way in ways:
            for up in (True, False):
                made = dist.new_group(list(ranks), backend=backend)
                if ranks == mine:
                    messages[way, up] = made
        for members in sorted(set(sums)):
            made = dist.new_group([ranks[i] for i in members], backend=backend)
            if ranks == mine:
                summing[members] = made
    return StageLinks(messages, summing)


def shapes_of(value: Any) -> Hashable:
    """What two micro-batches have in common if the same shapes pass through the model for both."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, shapes_of(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(shapes_of(one) for one in value)
    if is_dataclass(value):
        return tuple((f.name, shapes_of(getattr(value, f.name))) for f in fields(value))
    return value is None


def encode_ports(ports: tuple[StageInput, ...]) -> bytes:
    """As JSON: what comes from another process is data and no pickle, which could run code."""
    told = []
    for port in ports:
        layout = None
        if (known := port.layout) is not None:
            assert all(type(one) in (Replicate, Shard) for one in known.placements), known
            dims = [one.dim if isinstance(one, Shard) else None for one in known.placements]
            layout = [known.axes, dims, known.shape, known.stride]
        told.append(
            [port.place, port.shape, str(port.dtype).removeprefix("torch."), port.grad, layout]
        )
    return json.dumps(told).encode()


def decode_ports(data: bytes) -> tuple[StageInput, ...]:
    """What `encode_ports` wrote."""
    found = []
    for (argument, which), shape, name, grad, layout in json.loads(data):
        dtype, known = getattr(torch, name), None
        assert isinstance(dtype, torch.dtype), name
        if layout is not None:
            axes, dims, whole, stride = layout
            placements = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
            known = ShardLayout(tuple(axes), placements, tuple(whole), tuple(stride))
        found.append(StageInput((argument, which), tuple(shape), dtype, grad, known))
    return tuple(found)


class StageComm:
    """The messages of one step of one rank. `known` outlives it: what passes at a boundary for micro-batches alike."""

    def __init__(
        self,
        links: StageLinks,
        rank: int,
        owners: Sequence[int],
        orders: Orders,
        keys: Sequence[Hashable],
        known: dict[Hashable, tuple[StageInput, ...]],
        device: torch.device,
    ) -> None:
        self._links, self._rank, self._owners, self._device = links, rank, owners, device
        self._keys, self._known = keys, known
        self._expected = {
            (way, peer): deque(_sent(way, orders[peer], owners, peer, rank))
            for way in ("forward", "backward") for peer in range(len(orders)) if peer != rank
        }  # fmt: skip
        self._arriving: dict[
            Message, tuple[tuple[StageInput, ...], list[torch.Tensor], list[Any]]
        ] = {}
        self._sending: list[tuple[Message, Any, torch.Tensor]] = []
        self._back: dict[tuple[int, int], tuple[StageInput, ...]] = {}  # gradients that are to come

    def send(
        self, chunk: int, micro: int, ports: tuple[StageInput, ...], tensors: Sequence[torch.Tensor]
    ) -> None:
        """What a chunk needs for a micro-batch, to its owner."""
        message: Message = ("forward", chunk, micro)
        key = self._key(chunk, micro)
        if key not in self._known:
            self._known[key] = ports
            words = torch.frombuffer(bytearray(encode_ports(ports)), dtype=torch.uint8)
            self._post(message, torch.tensor([len(words)]))
            self._post(message, words)
        elif self._known[key] != ports:
            raise RuntimeError(
                f"chunk {chunk} is given {ports}, before it was {self._known[key]}: shapes do not tell"
            )
        self._back[chunk - 1, micro] = ports
        for tensor in tensors:
            self._post(message, tensor.detach())

    def send_back(self, chunk: int, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """The gradients of what a chunk made, to its owner."""
        for gradient in gradients:
            self._post(("backward", chunk, micro), gradient.detach())

    def receive(
        self, way: Way, chunk: int, micro: int
    ) -> tuple[tuple[StageInput, ...], list[torch.Tensor]]:
        """What was sent for a chunk and a micro-batch; waits for it."""
        source = self._owners[chunk - 1 if way == "forward" else chunk + 1]
        message = (way, chunk, micro)
        expected = self._expected[way, source]
        while message not in self._arriving:
            self._expect(expected.popleft(), source)
        ports, tensors, works = self._arriving.pop(message)
        if expected and self._may_come(expected[0], source):  # while this one is computed with
            self._expect(expected.popleft(), source)
        for work in works:
            work.wait()
        if way == "backward":  # so what it is the gradient of has arrived
            self._forget(("forward", chunk + 1, micro))
        return ports, [tensor.to(self._device) for tensor in tensors]

    def finish(self) -> None:
        """Waits until everything has been sent."""
        for _, work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _forget(self, arrived: Message) -> None:
        """Lets go of tensors that were sent."""
        left = []
        for message, work, tensor in self._sending:
            if message == arrived:
                work.wait()
            elif not work.is_completed():
                left.append((message, work, tensor))
        self._sending = left

    def _key(self, chunk: int, micro: int) -> Hashable:
        return (chunk, torch.is_grad_enabled(), self._keys[micro])

    def _group(self, way: Way, source: int, target: int) -> dist.ProcessGroup:
        return self._links.messages[way, target > source]

    def _post(self, message: Message, tensor: torch.Tensor) -> None:
        way, chunk, _ = message
        peer = self._owners[chunk]
        group = self._group(way, self._rank, peer)
        tensor = tensor.to("cpu" if goes_by_host(group) else self._device).contiguous()
        self._sending.append((message, dist.isend(tensor, group=group, group_dst=peer), tensor))

    def _take(
        self, way: Way, source: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Any]:
        group = self._group(way, source, self._rank)
        tensor = torch.empty(
            tuple(shape), dtype=dtype, device="cpu" if goes_by_host(group) else self._device
        )
        return tensor, dist.irecv(tensor, group=group, group_src=source)

    def _expect(self, message: Message, source: int) -> None:
        way, chunk, micro = message
        ports = (
            self._ports(chunk, micro, source)
            if way == "forward"
            else self._back.pop((chunk, micro))
        )
        wanted = [port for port in ports if port.grad or way == "forward"]
        taken = [self._take(way, source, port.shape, port.dtype) for port in wanted]
        self._arriving[message] = (
            ports,
            [tensor for tensor, _ in taken],
            [work for _, work in taken],
        )

    def _may_come(self, message: Message, source: int) -> bool:
        """Whether a message can be asked for ahead: it is clear what it consists of, and nothing has to wait for it."""
        way, chunk, micro = message
        # NCCL groups that are bound to a device have one queue for all pairs, the others one for each pair.
        free = getattr(self._group(way, source, self._rank), "bound_device_id", None) is None
        known = (
            self._key(chunk, micro) in self._known
            if way == "forward"
            else (chunk, micro) in self._back
        )
        return free and known

    def _ports(self, chunk: int, micro: int, source: int) -> tuple[StageInput, ...]:
        key = self._key(chunk, micro)
        if key not in self._known:
            length, work = self._take("forward", source, [1], torch.int64)
            work.wait()
            words, work = self._take("forward", source, [int(length)], torch.uint8)
            work.wait()
            self._known[key] = decode_ports(words.cpu().numpy().tobytes())
        return self._known[key]


def _sent(
    way: Way, order: Sequence[Any], owners: Sequence[int], source: int, target: int
) -> list[Message]:
    """The messages from one rank to another, in the order in which they are sent."""
    kinds = ("forward",) if way == "forward" else ("backward", "input")
    step = 1 if way == "forward" else -1
    return [
        (way, action.chunk + step, action.micro) for action in order
        if action.kind in kinds
        and 0 <= action.chunk + step < len(owners) and owners[action.chunk + step] == target != source
    ]  # fmt: skip
