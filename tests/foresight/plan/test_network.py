"""Collectives by hand: α and β are chosen so that the sums can be done on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.core.hardware.specs import Cluster, LinkSpec, cluster_of
from shardwise.foresight.plan.network import KINDS, bus_bandwidth, seconds

GB = 10**9


def toy(within: float = 100, across: float = 10) -> Cluster:
    """2 nodes of 4: 100 and 10 GB/s, 1 and 10 µs, launch 0."""
    base = cluster_of("h100", nodes=2, per_node=4)
    return replace(
        base,
        device=replace(base.device, launch=0.0),
        within=LinkSpec(within * GB, 1e-6),
        across=LinkSpec(across * GB, 10e-6),
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 3e-6 + 0.75 / 100),
        ("reduce_scatter", 3e-6 + 0.75 / 100),
        ("all_reduce", 6e-6 + 1.5 / 100),
        ("all_to_all", 2e-6 + 0.75 / 100),
        ("broadcast", 2e-6 + 1 / 100),
        ("send", 1e-6 + 1 / 100),
    ],
)
def test_within_a_node(kind: str, expected: float) -> None:
    """1 GB over 4 ranks of one node."""
    assert seconds(kind, GB, 4, 4, toy()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 8 ranks, 4 adapters of 10 GB/s per node: 40 GB/s; 1 hop between nodes and 6 within.
        ("all_gather", 16e-6 + 0.875 / 40),
        ("reduce_scatter", 16e-6 + 0.875 / 40),
        ("all_reduce", 2 * 16e-6 + 2 * 0.875 / 40),
        ("broadcast", 12e-6 + 1 / 40),
        # To each other rank 1/8: half of the tensor leaves over the rank's own adapter.
        ("all_to_all", 12e-6 + 0.5 / 10),
    ],
)
def test_across_nodes(kind: str, expected: float) -> None:
    assert seconds(kind, GB, 8, 4, toy()) == pytest.approx(expected)


def test_a_group_with_one_rank_per_node_has_one_adapter() -> None:
    assert seconds("all_gather", GB, 2, 1, toy()) == pytest.approx(10e-6 + 0.5 / 10)
    assert seconds("send", GB, 2, 1, toy()) == pytest.approx(10e-6 + 1 / 10)


def test_fast_networks_leave_the_link_within_as_the_bottleneck() -> None:
    assert seconds("all_gather", GB, 8, 4, toy(across=50)) == pytest.approx(16e-6 + 0.875 / 100)
    assert bus_bandwidth(4, 2, LinkSpec(100, 0), LinkSpec(50, 0)) == 100
    assert bus_bandwidth(1, 2, LinkSpec(100, 0), LinkSpec(500, 0)) == 500  # nothing passes within the node


def test_small_tensors_are_reduced_along_a_tree_and_large_ones_round_a_ring() -> None:
    """64 ranks on 16 nodes, 8 bytes: 2 x (4 x 10 + 2 x 1) µs; the ring would be 2 x (15 x 10 + 48 x 1)."""
    many = replace(toy(), nodes=16)
    assert seconds("all_reduce", 8, 64, 4, many) == pytest.approx(84e-6, rel=1e-4)
    ring = 2 * (15 * 10e-6 + 48e-6) + 2 * 63 / 64 * 100 / 40
    assert seconds("all_reduce", 100 * GB, 64, 4, many) == pytest.approx(ring)


def test_one_rank_is_free_and_a_launch_is_always_paid() -> None:
    cluster = cluster_of("h100", nodes=2)
    for kind in KINDS:
        assert seconds(kind, GB, 1, 1, cluster) == 0
        assert seconds(kind, 0, 2, 2, cluster) >= cluster.device.launch


def test_real_clusters_are_in_the_known_range() -> None:
    """Bus bandwidth of 8 x H100 with 8 x 400 Gb/s adapters: about 360 GB/s within and across nodes."""
    cluster = cluster_of("h100", nodes=4)
    for ranks in (8, 32):
        taken = seconds("all_reduce", 8 * GB, ranks, 8, cluster)
        assert 320e9 < 2 * (ranks - 1) / ranks * 8 * GB / taken < 365e9
    slow = cluster_of("h100", nodes=4, network="ethernet-100g")
    assert 2 * 31 / 32 * GB / seconds("all_reduce", GB, 32, 8, slow) == pytest.approx(9.4e9, rel=0.02)
