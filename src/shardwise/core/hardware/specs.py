"""Specifications of devices, links and clusters, in plain units: bytes, seconds, FLOP/s.

`cluster_of("h100", nodes=2)` builds one from the table (`hardware.yaml`, and the user's own file over it),
`this_machine()` describes the current machine, with measurements of `shardwise bench` in place of the table.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardwise.core.errors import UserError
from shardwise.core.hardware.catalogue import DeviceEntry, LinkEntry, catalogue

if TYPE_CHECKING:
    from shardwise.core.hardware.measured import MeasuredDevice

GIB, GIGA, TERA, MICRO = 2**30, 1e9, 1e12, 1e-6
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
CONTEXT = int(0.6 * GIB)  # of a GPU's memory, taken by the CUDA context and its libraries before the first tensor
AVX2_CORE = 40 * GIGA  # fp32 FLOP/s of one core, as measured on virtual machines; AVX-512 doubles it

_VENDOR = re.compile(r"AMD INSTINCT |(NVIDIA )?(GEFORCE |TESLA )?")


class Attention(NamedTuple):
    """Speed of flash attention; for backward, 2.5 times the forward FLOPs are counted."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Device:
    """One device, as torch counts them."""

    name: str
    kind: Literal["cuda", "rocm", "cpu"]
    memory: int  # bytes that tensors can fill
    peak: dict[str, float] = field(hash=False)  # dense FLOP/s by precision; one that is missing is not supported
    bandwidth: float  # bytes/s of its memory
    matmul: float  # share of the peak that large matmuls reach
    stream: float  # share of the bandwidth that elementwise kernels reach
    attention: Attention  # shares of the peak of `attends()`
    launch: float  # seconds from one small kernel to the next
    host_link: float  # bytes/s to and from the host, each way, pinned
    reached: dict[str, float] = field(default_factory=dict, hash=False)  # measured FLOP/s of matmuls by precision

    def flops(self, precision: str) -> float:
        """FLOP/s of large matmuls in a precision; if the device lacks it, of the next wider one."""
        computed = self.computes(precision)
        return self.reached.get(computed, self.matmul * self.peak[computed])

    def attention_flops(self) -> Attention:
        """FLOP/s of flash attention, forward and backward."""
        peak = self.peak[self.attends()]
        return Attention(self.attention.forward * peak, self.attention.backward * peak)

    def attends(self) -> str:
        """The precision that attention speeds refer to: bf16, fp16 on older GPUs, fp32 on a CPU."""
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if "bf16" in self.peak else self.computes("fp16")

    def computes(self, precision: str) -> str:
        """The precision the device actually computes in: the requested one, or the next wider it has."""
        assert precision in PRECISIONS, precision
        wider = {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16"), "tf32": ("tf32",)}
        return next((p for p in (*wider.get(precision, ()), "fp32") if p in self.peak), next(iter(self.peak)))


@dataclass(frozen=True)
class LinkSpec:
    """One device's share of a link."""

    bandwidth: float  # bytes/s, each direction
    latency: float  # seconds per hop


@dataclass(frozen=True)
class Cluster:
    """Identical nodes of identical devices."""

    device: Device
    nodes: int
    per_node: int
    within: LinkSpec
    across: LinkSpec  # per device: an adapter that a node's devices share counts as their shares of it
    host_memory: int  # bytes per node
    disk_read: float  # bytes/s per node
    disk_write: float
    host_adam: float  # parameters/s that AdamW updates on a node's cores
    price: float | None  # USD per device and hour

    @property
    def ranks(self) -> int:
        """Total number of devices."""
        return self.nodes * self.per_node

    @property
    def label(self) -> str:
        """Number of nodes, devices in each, and their name."""
        return f"{self.nodes} × {self.per_node} × {self.device.name}" if self.ranks > 1 else self.device.name


def find_device(name: str) -> Device:
    """Looks up a device by name, alias, or the name that torch reports; raises UserError with the closest match."""
    key, entry = _find(name)
    return _device(key, entry)


def device_names() -> list[str]:
    """Names that `find_device` knows, without aliases."""
    return list(catalogue().devices)


def network_names() -> list[str]:
    """Networks that `cluster_of` knows, without aliases."""
    return list(catalogue().networks)


def peak_of(torch_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the device with this full torch name; None if it is not known."""
    entry = _by_torch_name(torch_name)
    figure = getattr(entry[1].peak, precision) if entry else None
    return None if figure is None else float(figure) * TERA


def cluster_of(
    gpu: str,
    nodes: int = 1,
    per_node: int | None = None,
    network: str | None = None,
    price: float | None = None,
    memory: int | None = None,
    within: str | None = None,
    host_memory: int | None = None,
    disk_read: float | None = None,
    disk_write: float | None = None,
) -> Cluster:
    """A cluster of a known device with its usual links, prices and hosts; arguments override these.

    `memory` is bytes per device, `host_memory` bytes per node, disks are bytes/s per node.
    """
    for name, count in (("nodes", nodes), ("per_node", per_node)):
        if count is not None and count < 1:
            raise UserError(name, count, "must be at least 1", "give the number of nodes and of devices in each")
    known = catalogue()
    key, entry = _find(gpu)
    device = _device(key, entry)
    node = entry.node
    devices = per_node or node.per_node
    inner = _link("within", within or entry.within, known.links)
    outer = _link("network", network or entry.across, known.networks)
    return Cluster(
        device=device if memory is None else replace(device, memory=memory),
        nodes=nodes,
        per_node=devices,
        within=_per_device(inner, devices),
        across=_per_device(outer, devices),
        host_memory=host_memory or int(node.host_memory * GIB),
        disk_read=disk_read or node.disk_read * GIGA,
        disk_write=disk_write or node.disk_write * GIGA,
        host_adam=node.host_adam * GIGA,
        price=entry.price if price is None else price,
    )


def this_machine(measured: bool = True) -> Cluster:
    """This machine as a cluster of one node: its GPUs, else its cores; with measurements of `shardwise bench`."""
    import torch

    from shardwise.core.hardware.measured import applied, read_measured

    cuda = torch.cuda.is_available()
    measurements = read_measured(torch.cuda.get_device_name() if cuda else "cpu") if measured else None
    if not cuda:
        cluster = _cores()
    elif (entry := _by_torch_name(torch.cuda.get_device_name())) is not None:
        cluster = _gpus(entry[0])
    else:
        cluster = _unknown_gpus(torch.cuda.get_device_name(), measurements)
    return cluster if measurements is None else applied(measurements, cluster)


def _gpus(key: str) -> Cluster:
    import torch

    from shardwise.core.cpu_probe import usable_memory

    memory = torch.cuda.get_device_properties(0).total_memory - CONTEXT
    return cluster_of(key, per_node=torch.cuda.device_count(), memory=memory, host_memory=usable_memory())


def _unknown_gpus(name: str, measurements: MeasuredDevice | None) -> Cluster:
    """GPUs that are not in the table: measured speeds are used as their peak."""
    import torch

    if measurements is None or not measurements.matmul or not measurements.stream:
        remedy = "run `shardwise bench`, which measures it, or add it to hardware.yaml (docs/hardware.md)"
        raise UserError("gpu", name, "this GPU is not in the hardware table", remedy)
    base = _gpus("a10")  # for the links of an ordinary server, where they were not measured
    kind: Literal["cuda", "rocm"] = "rocm" if torch.version.hip else "cuda"
    device = replace(
        base.device,
        name=name,
        kind=kind,
        peak=measurements.matmul,
        matmul=1.0,
        bandwidth=measurements.stream,
        stream=1.0,
    )
    return replace(base, device=device, price=None)


def _cores() -> Cluster:
    """The CPU as one device, with the cores and the memory that a process may use."""
    from shardwise.core.cpu_probe import cpu_identity, usable_cores, usable_memory

    _, flags = cpu_identity()
    cores = usable_cores()
    memory = usable_memory()
    fp32 = cores * AVX2_CORE * (2 if "avx512f" in flags else 1)
    base = cluster_of("cpu", per_node=1, memory=memory, host_memory=memory)
    adam = min(base.host_adam, 0.25 * GIGA * cores)  # 4 G parameters/s were measured on 16 cores
    # Emulated, 16 bits are far slower than fp32, and flags do not tell whether more works (see core/cpu_probe.py).
    device = replace(base.device, peak={"fp32": fp32, "bf16": 0.1 * fp32, "fp16": 0.1 * fp32})
    return replace(base, device=device, host_adam=adam)


def _find(name: str) -> tuple[str, DeviceEntry]:
    devices = catalogue().devices
    plain_name = _plain(name)
    for key, entry in devices.items():
        if plain_name in {_plain(word) for word in (key, *entry.aliases)}:
            return key, entry
    if match := _by_torch_name(name):
        return match
    words = {_plain(word): key for key, entry in devices.items() for word in (key, *entry.aliases)}
    near = list(dict.fromkeys(words[word] for word in difflib.get_close_matches(plain_name, words, n=3, cutoff=0.5)))
    remedy = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(devices)}"
    raise UserError("gpu", name, "is not in the hardware table", f"{remedy} Others can be added: docs/hardware.md")


def _by_torch_name(name: str) -> tuple[str, DeviceEntry] | None:
    name = " ".join(name.upper().split())
    prefix = _VENDOR.match(name)
    model = name[prefix.end() :] if prefix else name
    for key, entry in catalogue().devices.items():
        if any(re.fullmatch(rf"(?:{pattern})(?: OAM)?", model) for pattern in entry.torch):
            return key, entry
    return None


def _plain(name: str) -> str:
    """Normalised name: "RTX 4090", "NVIDIA GeForce RTX 4090" and "rtx4090" are "rtx4090"."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())


def _device(key: str, entry: DeviceEntry) -> Device:
    peak = {p: figure * TERA for p in PRECISIONS if (figure := getattr(entry.peak, p)) is not None}
    return Device(
        name=key,
        kind=entry.kind,
        memory=int(entry.memory * GIB) - (0 if entry.kind == "cpu" else CONTEXT),
        peak=peak,
        bandwidth=entry.bandwidth * GIGA,
        matmul=entry.matmul,
        stream=entry.stream,
        attention=Attention(*entry.attention),
        launch=entry.launch * MICRO,
        host_link=entry.host_link * GIGA,
    )


def _link(field: str, name: str, known: dict[str, LinkEntry]) -> LinkEntry:
    for key, entry in known.items():
        if name.lower() in (key, *entry.aliases):
            return entry
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(field, name, "is not in the hardware table", f"{hint}known: {', '.join(known)}")


def _per_device(entry: LinkEntry, devices: int) -> LinkSpec:
    shared = devices if entry.per == "node" else 1
    return LinkSpec(entry.bandwidth * GIGA / shared, entry.latency * MICRO)
