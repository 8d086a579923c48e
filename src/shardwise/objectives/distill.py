"""Distillation (arXiv 1503.02531): KL(teacher ‖ student) over the trained tokens, plus plain loss.

[Note: likeliest] With top_k, both distributions have k + 1 outcomes: the teacher's k likeliest
tokens, and any other. The temperature applies to these k + 1, not to the vocabulary, so stored
answers of a teacher serve any temperature; with all tokens it is the same.
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
    """The k likeliest tokens of each line, and their `outcomes`."""
    top = log_probs.topk(k, dim=-1)
    return top.indices, outcomes(log_probs, top.indices)


def outcomes(log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of these tokens and, last, of all others together (-inf if none)."""
    others = log_probs.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, tokens), others], -1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² KL(teacher ‖ student) of each line of log-probabilities, at a temperature T."""
    teacher = (teacher / temperature).log_softmax(-1)
    student = (student / temperature).log_softmax(-1)
    return temperature**2 * (teacher.exp() * (teacher - student)).sum(-1)


class TeacherLogProbs:
    """A frozen model's log-probabilities of the first `vocabulary` tokens at a batch's places."""

    def __init__(self, model: Any, apart: bool, vocabulary: int) -> None:
        self._model = model
        self._causal = CausalObjective(model, apart)
        self._vocabulary = vocabulary

    @torch.no_grad()
    def __call__(self, batch: DistillationBatch) -> torch.Tensor:
        """Log-probabilities, (places, vocabulary), in fp32."""
        logits = self._model(**self._causal.inputs(batch)).logits.flatten(0, 1)[batch.places]
        result: torch.Tensor = logits[:, : self._vocabulary].float().log_softmax(-1)
        return result


class DistillObjective:
    """weight · T² KL + (1 - weight) · the plain loss, summed over trained tokens.

    `teacher` is None if its answers are stored.
    """

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
        self._causal = CausalObjective(model, apart)
        self._settings = settings
        self._vocabulary = vocabulary
        self._teacher = teacher

    def __call__(self, model: Any, batch: DistillationBatch) -> Loss:
        """The loss, without host syncs: the batch knows the places of its trained tokens."""
        teacher = None if self._teacher is None else self._teacher(batch)
        logits = model(**self._causal.inputs(batch)).logits.flatten(0, 1)[batch.places]
        student = logits.float().log_softmax(-1)
        plain = -student.gather(-1, batch.labels.flatten()[batch.places][:, None])[:, 0]
        kl = self._divergence(teacher, student[:, : self._vocabulary], batch)
        weight = self._settings.weight
        losses = weight * kl + (1 - weight) * plain
        sources = None if batch.sources is None else batch.sources.flatten()[batch.places]
        loss = sum_by_source(losses, torch.ones_like(losses), sources, batch.source_count)
        figures = {"loss_teacher": kl.detach().sum(), "loss_plain": plain.detach().sum()}
        return replace(loss, figures=figures)

    def _divergence(
        self, teacher: torch.Tensor | None, student: torch.Tensor, batch: DistillationBatch
    ) -> torch.Tensor:
        k = self._settings.top_k
        temperature = self._settings.temperature
        if k is None or (k == self._vocabulary and teacher is not None):
            assert teacher is not None
            return divergence(teacher, student, temperature)
        if teacher is None:
            assert batch.likeliest is not None and batch.log_probs is not None
            tokens = batch.likeliest
            answers = batch.log_probs
        else:
            tokens, answers = likeliest(teacher, k)
        if k == self._vocabulary:  # stored answers of all tokens: there are no others
            return divergence(answers[:, :-1], student.gather(-1, tokens), temperature)
        return divergence(answers, outcomes(student.log_softmax(-1), tokens), temperature)


def make_distill(
    job: ResolvedRun, world: World, sharded: ShardedModel, apart: bool, say: Callable[[str], None]
) -> DistillObjective:
    """The objective, with the teacher loaded or, with `cache`, all of its answers stored."""
    from shardwise.objectives.teacher_log_probs import ask_teacher, missing_answers

    settings = job.run.objective
    source = job.teacher
    assert isinstance(settings, Distill) and source is not None
    teacher = None
    if source.answers is None:
        teacher = load_teacher(job, world, say)
    else:
        missing = missing_answers(job, world)
        if missing:
            ask_teacher(job, world, load_teacher(job, world, say), missing, say)
    return DistillObjective(sharded.model, apart, settings, source.vocabulary, teacher)


def load_teacher(job: ResolvedRun, world: World, say: Callable[[str], None]) -> TeacherLogProbs:
    """The teacher, frozen, sharded and checked like the trained model."""
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
