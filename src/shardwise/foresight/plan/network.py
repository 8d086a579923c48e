"""Time of a collective on a cluster: latency per hop, and bytes over the slowest link on the way.

A group of n ranks has k of them in each node it touches (`per_node_in_group`), so it spans m = ⌈n/k⌉ nodes. α and β are
the latency and bandwidth per device of `within` (w) and `across` (a), λ is the device's launch. S is `nbytes`: of
`all_reduce` and `broadcast` the tensor, of `all_gather` the gathered result, of `reduce_scatter` the whole input, of
`all_to_all` what one rank holds for all, of `send` the message.

In one node a group has β = βw. Between nodes, rings and trees pass through all its ranks' adapters at once, so a node
hands on k·βa, and what passes within the node still needs βw: β = min(βw, k·βa). Steps are pipelined, hence the minimum
and not a sum. Ranks of a node that are not in this group are taken to be in one of their own, on adapters of their own.

    one rank        0
    all_gather      λ + (m-1)αa + (n-m)αw + (n-1)/n · S/β        ring
    reduce_scatter  the same
    all_reduce      λ + the less of
                      2((m-1)αa + (n-m)αw) + 2(n-1)/n · S/β      ring
                      2(⌈log2 m⌉αa + ⌈log2 k⌉αw) + 2S/β          double binary tree
    broadcast       λ + ⌈log2 m⌉αa + ⌈log2 k⌉αw + S/β            tree
    all_to_all      λ + ⌈log2 m⌉αa + ⌈log2 k⌉αw + max((k-1)/n · S/βw, (n-k)/n · S/βa)
    send            λ + α + S/β of one device's link: within if k > 1, else across
"""

from __future__ import annotations

from math import ceil, log2
from typing import Literal, get_args

from shardwise.core.hardware.specs import Cluster, LinkSpec

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
KINDS: tuple[str, ...] = get_args(Kind)


def seconds(kind: str, nbytes: float, ranks: int, per_node_in_group: int, cluster: Cluster) -> float:
    """Returns the seconds one collective takes on each rank of the group (see the formulas above)."""
    assert kind in KINDS, kind
    if ranks <= 1:
        return 0.0
    n = ranks
    k = max(1, min(per_node_in_group, ranks))
    within = cluster.within
    across = cluster.across
    launch = cluster.device.launch
    if kind == "send":
        link = within if k > 1 else across
        return launch + link.latency + nbytes / link.bandwidth
    m = ceil(n / k)
    hops = (m - 1) * across.latency + (n - m) * within.latency
    depth = ceil(log2(m)) * across.latency + ceil(log2(k)) * within.latency
    if kind == "all_to_all":
        inside = (k - 1) / n * nbytes / within.bandwidth
        outside = (n - k) / n * nbytes / across.bandwidth
        return launch + depth + max(inside, outside)
    wire = nbytes / bus_bandwidth(k, m, within, across)
    if kind == "broadcast":
        return launch + depth + wire
    if kind == "all_reduce":
        return launch + 2 * min(hops + (n - 1) / n * wire, depth + wire)
    return launch + hops + (n - 1) / n * wire


def bus_bandwidth(per_node_in_group: int, nodes: int, within: LinkSpec, across: LinkSpec) -> float:
    """Returns the bytes/s at which a ring or tree moves a tensor: that of the slowest link it crosses."""
    if nodes == 1:
        return within.bandwidth
    between = per_node_in_group * across.bandwidth
    return between if per_node_in_group == 1 else min(within.bandwidth, between)
