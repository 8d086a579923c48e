"""Puts documents together into sequences: best fit, so that little is padding; same result for a seed on any rank."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int, seed: int, epoch: int, packing: bool) -> list[np.ndarray]:
    """The sequences of one epoch, each as indices of documents; shuffled by (seed, epoch)."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    if not packing:
        return [np.array([i]) for i in order]
    bins = _best_fit(lengths, order, capacity)
    return [np.array(bins[i]) for i in rng.permutation(len(bins))]


def _best_fit(lengths: np.ndarray, order: np.ndarray, capacity: int) -> list[list[int]]:
    """Each document goes where it leaves the least room; longest first, ties in shuffled order."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room left, bin), sorted by room
    for document in order[np.argsort(-lengths[order], kind="stable")]:
        length = int(lengths[document])
        at = bisect_left(open_bins, (length, -1))
        if at == len(open_bins):
            bins.append([int(document)])
            room, number = capacity - length, len(bins) - 1
        else:
            room, number = open_bins.pop(at)
            bins[number].append(int(document))
            room -= length
        if room > 0:
            insort(open_bins, (room, number))
    return bins
