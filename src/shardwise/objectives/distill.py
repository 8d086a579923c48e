"""Learning from a teacher: KL(teacher ‖ pupil) over the learned tokens, beside the plain loss (arXiv 1503.02531).

[Note: likeliest] With top_k, both distributions are looked at as k + 1 outcomes: the teacher's k likeliest tokens, and
any other. The temperature softens these k + 1, not the vocabulary, so that what is stored of a teacher serves any
temperature; with all tokens it is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.config.objectives import Distill
from shardwise.data.distillation_batch import DistillationBatch
from shardwise.nn.models.build import vocabulary_size
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.objectives.causal import CausalObjective

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.parallel.zero.stages import ShardedModel
    from shardwise.resolved_run import ResolvedRun


def likeliest(log_probs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens of each line, and the log-probabilities of these and of all others together."""
    top = log_probs.topk(k, dim=-1)
    return top.indices, outcomes(log_probs, top.indices)


def outcomes(log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of these tokens and, last, of any other (none where these are all)."""
    others = log_probs.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, tokens), others], -1)


def divergence(teacher: torch.Tensor, pupil: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² KL(teacher ‖ pupil) of each line of log-probabilities, softened."""
    teacher, pupil = ((x / temperature).log_softmax(-1) for x in (teacher, pupil))
    return temperature**2 * (teacher.exp() * (teacher - pupil)).sum(-1)


class TeacherLogProbs:
    """A frozen model's log-probabilities of all tokens at the places of a batch, over a vocabulary of this size."""

    def __init__(self, model: Any, apart: bool, vocabulary: int) -> None:
        self._model, self._causal, self._vocabulary = (
            model,
            CausalObjective(model, apart),
            vocabulary,
        )

    @torch.no_grad()
    def __call__(self, batch: DistillationBatch) -> torch.Tensor:
        """(places, vocabulary)"""
        logits = self._model(**self._causal.inputs(batch)).logits.flatten(0, 1)[batch.places]
        result: torch.Tensor = logits[:, : self._vocabulary].float().log_softmax(-1)
        return result


class DistillObjective:
    """weight · T² KL + (1 - weight) · the plain loss, summed over learned tokens; `teacher` is None if it was asked."""

    figures: tuple[str, ...] = ("loss_teacher", "loss_plain")
    of_tokens = False

    def __init__(
        self,
        model: Any,
        apart: bool,
        settings: Distill,
        vocabulary: int,
        teacher: TeacherLogProbs | None,
    ) -> None:
        self._causal, self._settings = CausalObjective(model, apart), settings
        self._vocabulary, self._teacher = vocabulary, teacher

    def __call__(self, model: Any, batch: DistillationBatch) -> Loss:
        """Never waits for the device: where the learned tokens are is known from the batch."""
        settings, teacher = self._settings, self._teacher
        told = None if teacher is None else teacher(batch)
        logits = model(**self._causal.inputs(batch)).logits.flatten(0, 1)[batch.places]
        pupil = logits.float().log_softmax(-1)
        plain = -pupil.gather(-1, batch.labels.flatten()[batch.places][:, None])[:, 0]
        gap = self._gap(told, pupil[:, : self._vocabulary], batch)
        losses = settings.weight * gap + (1 - settings.weight) * plain
        sources = None if batch.sources is None else batch.sources.flatten()[batch.places]
        loss = sum_by_source(losses, torch.ones_like(losses), sources, batch.source_count)
        figures = {"loss_teacher": gap.detach().sum(), "loss_plain": plain.detach().sum()}
        return replace(loss, figures=figures)

    def _gap(
        self, teacher: torch.Tensor | None, pupil: torch.Tensor, batch: DistillationBatch
    ) -> torch.Tensor:
        k, temperature = self._settings.top_k, self._settings.temperature
        if k is None or (k == self._vocabulary and teacher is not None):
            assert teacher is not None
            return divergence(teacher, pupil, temperature)
        if teacher is None:
            tokens, told = batch.likeliest, batch.log_probs
            assert tokens is not None and told is not None
        else:
            tokens, told = likeliest(teacher, k)
        if k == self._vocabulary:  # stored: there are no others
            return divergence(told[:, :-1], pupil.gather(-1, tokens), temperature)
        return divergence(told, outcomes(pupil.log_softmax(-1), tokens), temperature)


def make_distill(
    job: ResolvedRun, world: World, sharded: ShardedModel, apart: bool, say: Callable[[str], None]
) -> DistillObjective:
    """Loads the teacher, or asks it for what is not stored yet and lets it go."""
    from shardwise.objectives.teacher_log_probs import ask_teacher, missing_answers

    settings, found = job.run.objective, job.teacher
    assert isinstance(settings, Distill) and found is not None
    teacher = None
    if found.answers is None:
        teacher = load_teacher(job, world, say)
    elif missing := missing_answers(job, world):
        ask_teacher(job, world, load_teacher(job, world, say), missing, say)
    return DistillObjective(sharded.model, apart, settings, found.vocabulary, teacher)


def load_teacher(job: ResolvedRun, world: World, say: Callable[[str], None]) -> TeacherLogProbs:
    """The teacher, frozen and divided over the ranks, and checked as the model itself is."""
    from shardwise.parallel.frozen_model import build_frozen
    from shardwise.parallel.selfcheck import check_documents

    assert job.teacher is not None
    source = job.teacher.source
    frozen = build_frozen(source, job.run, world)
    model: Any = frozen.model
    vocabulary = vocabulary_size(model)
    apart = check_documents(frozen, vocabulary, replace(job, source=source), world.device, say)
    model.eval()
    return TeacherLogProbs(model, apart, job.teacher.vocabulary)
