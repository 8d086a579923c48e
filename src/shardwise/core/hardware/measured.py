"""Measurements of `shardwise bench` on this host: cached, one file per host and device.

A figure that was not measured is None, and the table's is used instead.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.core.cache import cache_root
from shardwise.core.hardware.specs import Attention, Cluster, Device, LinkSpec

VERSION = 1  # raise it when a figure changes its meaning: older files are then left aside


@dataclass(frozen=True)
class MeasuredDevice:
    """Measurements of one device on one host, in bytes, seconds and FLOP/s."""

    device: str  # as torch reports it, or "cpu"
    host: str
    when: str  # ISO date and time
    torch: str
    matmul: dict[str, float] = field(default_factory=dict)  # best FLOP/s by precision
    stream: float | None = None  # bytes/s read and written by copy and add
    attention_forward: float | None = None  # FLOP/s
    attention_backward: float | None = None
    launch: float | None = None
    host_link: float | None = None  # the slower direction
    disk_read: float | None = None
    disk_write: float | None = None
    host_adam: float | None = None  # parameters/s
    within_bandwidth: float | None = None
    within_latency: float | None = None
    across_bandwidth: float | None = None
    across_latency: float | None = None
    details: dict[str, Any] = field(default_factory=dict)  # every single measurement, to look at


def measured_file(device: str, host: str | None = None) -> Path:
    """Path of the measurements of a device on a host (default: this one)."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{host or socket.gethostname()}-{device}").strip("-")
    return cache_root() / "bench" / f"{name}.json"


def read_measured(device: str) -> MeasuredDevice | None:
    """Measurements of this device on this host; None if there are none that this version can read."""
    try:
        stored = json.loads(measured_file(device).read_text())
        return MeasuredDevice(**stored["measured"]) if stored["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_measured(measured: MeasuredDevice) -> Path:
    """Stores the measurements atomically."""
    file = measured_file(measured.device, measured.host)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump({"version": VERSION, "measured": asdict(measured)}, out, indent=1)
        os.replace(partial, file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return file


def applied(measured: MeasuredDevice, cluster: Cluster) -> Cluster:
    """The cluster with measured figures in place of the table's."""
    links = {
        name: LinkSpec(
            getattr(measured, f"{name}_bandwidth") or getattr(cluster, name).bandwidth,
            getattr(measured, f"{name}_latency") or getattr(cluster, name).latency,
        )
        for name in ("within", "across")
    }
    return replace(
        cluster,
        device=_device(measured, cluster.device),
        within=links["within"],
        across=links["across"],
        disk_read=measured.disk_read or cluster.disk_read,
        disk_write=measured.disk_write or cluster.disk_write,
        host_adam=measured.host_adam or cluster.host_adam,
    )


def _device(measured: MeasuredDevice, device: Device) -> Device:
    """Measured speeds as fractions of the table's peak, so that MFU keeps its meaning.

    A CPU has no published peak: the measured speed is used as such.
    """
    peak = device.peak
    matmul = device.matmul
    stream = device.stream
    bandwidth = device.bandwidth
    if device.kind == "cpu":
        peak = {**peak, **{precision: speed / matmul for precision, speed in measured.matmul.items()}}
        bandwidth = measured.stream / stream if measured.stream else bandwidth
    else:
        known = [p for p in ("bf16", "fp16", "fp32") if p in measured.matmul and p in peak]
        matmul = measured.matmul[known[0]] / peak[known[0]] if known else matmul
        stream = measured.stream / bandwidth if measured.stream else stream
    half = peak[device.attends()]
    attention = Attention(
        measured.attention_forward / half if measured.attention_forward else device.attention.forward,
        measured.attention_backward / half if measured.attention_backward else device.attention.backward,
    )
    return replace(
        device,
        peak=peak,
        matmul=matmul,
        attention=attention,
        stream=stream,
        bandwidth=bandwidth,
        launch=measured.launch or device.launch,
        host_link=measured.host_link or device.host_link,
        reached={p: speed for p, speed in measured.matmul.items() if p in peak},
    )
