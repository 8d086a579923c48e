"""The table has what is asked for, names are found as people write them, and a user's file changes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.core.errors import UserError
from shardwise.core.hardware import specs as hardware
from shardwise.core.hardware.catalogue import catalogue
from shardwise.core.hardware.measured import MeasuredDevice, applied, measured_file, read_measured, write_measured
from shardwise.core.hardware.specs import cluster_of, device_names, find_device, network_names, peak_of, this_machine

GIB = 2**30


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table and no measurements of whoever runs the tests."""
    monkeypatch.setenv("SHARDWISE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDWISE_HARDWARE", raising=False)
    yield


def own_table(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """The user's file, by the variable."""
    file = folder / "mine.yaml"
    file.write_text(text)
    monkeypatch.setenv("SHARDWISE_HARDWARE", str(file))


def test_every_entry_is_plausible() -> None:
    for name in device_names():
        device = find_device(name)
        assert device.name == name and device.memory > 8 * GIB, name
        speeds = [device.peak[p] for p in ("fp32", "tf32", "bf16", "fp8") if p in device.peak]
        assert speeds == sorted(speeds), f"{name}: narrower is never slower"
        assert 1e-7 < device.launch < 1e-4 and 1e9 < device.host_link < 1e12, name
        cluster = cluster_of(name, nodes=2)
        assert cluster.ranks == 2 * cluster.per_node
        assert cluster.across.bandwidth <= cluster.within.bandwidth or cluster.per_node == 1, name
        assert hash(cluster) == hash(cluster_of(name, nodes=2))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("a100", "a100-sxm-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("rtx_3060", "rtx-3060"),
        ("RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("v100", "v100-sxm-16gb"),
        ("V100-32GB", "v100-sxm-32gb"),
        ("a6000", "rtx-a6000"),
        ("RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", "cpu"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert find_device(written).name == name


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"gpu = 'h101'.*\n.*did you mean .*h100-sxm"):
        find_device("h101")
    with pytest.raises(UserError, match="known: gb300"):
        find_device("quantum!")
    with pytest.raises(UserError, match="did you mean ib-400"):
        cluster_of("h100", network="ib400")
    with pytest.raises(UserError, match="within = 'nvlink9'"):
        cluster_of("h100", within="nvlink9")
    with pytest.raises(UserError, match="nodes = 0"):
        cluster_of("h100", nodes=0)


def test_data_sheets() -> None:
    h200 = find_device("h200")
    assert h200.peak["bf16"] == pytest.approx(989.4e12) and h200.flops("bf16") == pytest.approx(797e12, rel=1e-3)
    assert h200.attention_flops().forward == pytest.approx(577e12, rel=1e-3)
    # 466 TFLOP/s over forward (1 part) and backward (2.5 parts) at 577 forward.
    assert 3.5 / (1 / 577 + 2.5 / (h200.attention_flops().backward / 1e12)) == pytest.approx(466, rel=2e-3)
    assert find_device("t4").computes("bf16") == "fp32" and find_device("t4").attends() == "fp16"
    assert find_device("a100").computes("fp8") == "bf16" and find_device("v100").computes("fp8") == "fp16"
    assert find_device("mi250x").memory < 64 * GIB
    assert peak_of("NVIDIA A100-SXM4-80GB", "tf32") == pytest.approx(156e12)


def test_each_part_of_a_cluster_can_be_given() -> None:
    usual = cluster_of("h100", nodes=4)
    assert (usual.nodes, usual.per_node, usual.ranks, usual.price) == (4, 8, 32, 3.0)
    assert usual.within.bandwidth == 360e9 and usual.across.bandwidth == 46e9
    other = cluster_of(
        "h100", 2, 4, network="ethernet-100g", price=1.5, memory=10 * GIB, within="pcie-5", host_memory=GIB,
        disk_read=5e9, disk_write=4e9,
    )  # fmt: skip
    assert (other.ranks, other.price, other.device.memory, other.host_memory) == (8, 1.5, 10 * GIB, GIB)
    assert other.across.bandwidth == pytest.approx(9.4e9 / 4), "four devices share the adapter"
    assert other.within.bandwidth == 40e9 and (other.disk_read, other.disk_write) == (5e9, 4e9)
    assert cluster_of("h100", network="roce") == cluster_of("h100", network="roce-400")
    assert "ib-200" in network_names()


def test_a_file_of_ones_own_adds_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    devices:
      h100-sxm: {price: 1.99, peak: {bf16: 900}}
      h100-lab: {like: h100-sxm, memory: 94, aliases: [lab], node: {like: dgx, per_node: 4}, across: attic}
    networks:
      attic: {bandwidth: 2, latency: 40, per: node}
    """
    own_table(monkeypatch, tmp_path, text)
    cluster = cluster_of("lab", nodes=2)
    assert cluster.per_node == 4 and cluster.across.bandwidth == 0.5e9 and cluster.price == 1.99
    assert cluster.device.peak["bf16"] == pytest.approx(900e12) and cluster.device.peak["fp8"] > 1900e12
    assert find_device("h100").name == "h100-sxm", "names stay with the entry that has them"
    assert cluster_of("h100").price == 1.99
    (tmp_path / "config").mkdir()
    monkeypatch.delenv("SHARDWISE_HARDWARE")
    (tmp_path / "config" / "hardware.yaml").write_text("devices: {t4: {price: 0.01}}")
    assert cluster_of("t4").price == 0.01 and cluster_of("h100").price == 3.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices: {h100-sxm: {memory: lots}}", "devices.h100-sxm.memory = 'lots'"),
        ("devices: {h100-sxm: {matmul: 1.5}}", "less than or equal to 1"),
        ("devices: {h100-sxm: {vram: 80}}", "devices.h100-sxm.vram = 80: extra inputs"),
        ("devices: {mine: {memory: 80}}", "devices.mine"),
        ("devices: {mine: {like: h1000}}", "devices.mine.like = 'h1000'"),
        ("devices: {h100-sxm: {across: carrier-pigeon}}", "is none of the networks"),
        ("devices: {h100-sxm: {node: attic}}", "is none of the nodes"),
        ("devices: {h100-sxm: 5}", "is not a table of fields"),
        ("gpus: {h100-sxm: {}}", "unknown section"),
        ("[1, 2]", "is not a table of sections"),
        ("devices: {", "cannot be read"),
    ],
)
def test_a_bad_entry_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    own_table(monkeypatch, tmp_path, text)
    with pytest.raises(UserError) as caught:
        catalogue()
    assert told in str(caught.value) and str(caught.value).count("→") == 1


def test_a_missing_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_HARDWARE", "/nowhere.yaml")
    with pytest.raises(UserError, match="no such file"):
        catalogue()


def test_this_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine = this_machine()
    assert machine.device.kind == "cpu" and machine.ranks == 1
    assert machine.device.memory == machine.host_memory > GIB // 2
    write_measured(MeasuredDevice(
        "cpu", _host(), "2025-01-01", "2.11", matmul={"fp32": 8e10}, disk_read=7e8, host_adam=2e8, stream=1e10,
        attention_forward=4e10, launch=2e-6, within_bandwidth=3e9,
    ))  # fmt: skip
    measured = this_machine()
    assert measured.device.flops("fp32") == pytest.approx(8e10)
    assert measured.device.attention_flops().forward == pytest.approx(4e10)
    assert measured.device.bandwidth * measured.device.stream == pytest.approx(1e10)
    assert (measured.disk_read, measured.host_adam, measured.within.bandwidth) == (7e8, 2e8, 3e9)
    assert measured.within.latency == machine.within.latency and measured.disk_write == machine.disk_write


def test_this_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=139 * GIB))
    machine = this_machine()
    assert (machine.device.name, machine.per_node) == ("h200", 2)
    assert machine.device.memory == 139 * GIB - hardware.CONTEXT
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA Imaginary 1")
    with pytest.raises(UserError, match="not in the hardware table"):
        this_machine()
    write_measured(MeasuredDevice("NVIDIA Imaginary 1", _host(), "", "", matmul={"bf16": 5e13}, stream=4e11))
    unknown = this_machine()
    assert unknown.device.name == "NVIDIA Imaginary 1" and unknown.price is None
    assert unknown.device.flops("bf16") == 5e13 and unknown.device.bandwidth * unknown.device.stream == 4e11


def test_measured_shares_are_of_the_table_s_peak() -> None:
    cluster = cluster_of("h200")
    found = MeasuredDevice("NVIDIA H200", "here", "", "", matmul={"bf16": 800e12, "fp8": 1200e12}, stream=4.3e12,
                     attention_forward=600e12, attention_backward=450e12, host_link=50e9, across_bandwidth=20e9,
                     across_latency=7e-6)  # fmt: skip
    after = applied(found, cluster)
    assert after.device.peak == cluster.device.peak, "MFU keeps its meaning"
    assert after.device.matmul == pytest.approx(800 / 989.4) and after.device.flops("fp8") == pytest.approx(1200e12)
    assert after.device.stream == pytest.approx(4.3 / 4.8) and after.device.host_link == 50e9
    assert after.device.attention_flops() == pytest.approx((600e12, 450e12))
    assert (after.across.bandwidth, after.across.latency) == (20e9, 7e-6) and after.within == cluster.within


def test_results_of_other_versions_are_left_aside() -> None:
    file = write_measured(MeasuredDevice("cpu", _host(), "", ""))
    assert file == measured_file("cpu") and read_measured("cpu") is not None
    file.write_text(file.read_text().replace('"version": 1', '"version": 0'))
    assert read_measured("cpu") is None
    file.write_text("{")
    assert read_measured("cpu") is None
    assert not list(file.parent.glob("*.partial"))


def _host() -> str:
    import socket

    return socket.gethostname()
