"""Naive model parallelism: a model too large for one device lies on several, which take turns, as with a `device_map`.

The stages are those of a pipeline, the order is one micro-batch at a time: forward through all ranks, back through all.
Nothing overlaps, so each of n ranks idles at least 1 - 1/n of the time. It is here to be compared with: pipelines with
more micro-batches under way compute the same in less time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardwise.parallel.pipeline import Facts, Pipeline, Schedule, Stages, bubble, cut_model, picture

NAIVE = Schedule("naive")


def spread_model(model: nn.Module, facts: Facts, group: dist.ProcessGroup, device: torch.device) -> Pipeline:
    """Leaves on each rank its share of the blocks; the pipeline records its times."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    stages = Stages(model, cut_model(model, facts, ranks), rank, ranks, NAIVE)
    pipeline = Pipeline(stages, group, NAIVE, device)
    pipeline.record = True
    return pipeline


def explain_idle(pipeline: Pipeline) -> str:
    """How long the ranks did nothing in the latest step, and a picture of it; collective."""
    spans, ranks = pipeline.all_spans(), pipeline.stages.ranks
    least = 1 - 1 / ranks
    share = f"{bubble(spans, ranks):.0%} of the {ranks} ranks' time was idle"
    return f"{share} (at least {least:.0%} with one micro-batch at a time)\n{picture(spans, ranks)}"
