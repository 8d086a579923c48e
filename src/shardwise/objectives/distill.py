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

from shardwise.config.axes import check_model_axes
from shardwise.config.objectives import Distill
from shardwise.config.schema import Parallel, Run
from shardwise.core.errors import UserError
from shardwise.data.distillation_batch import DistillationBatch
from shardwise.nn.models.build import vocabulary_size
from shardwise.nn.models.teacher import Teacher
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.objectives.answer_log_probs import Reference
from shardwise.objectives.causal import CausalObjective
from shardwise.objectives.head import full_logits_at
from shardwise.parallel.frozen_model import build_frozen, frozen_run

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


Answers = tuple[torch.Tensor | None, torch.Tensor]  # k likeliest tokens (None: all), log-probs


class TeacherLogProbs:
    """A frozen model's log-probabilities of the first `vocabulary` tokens at a batch's places.

    `reference`: the model, as it can be asked.
    """

    def __init__(self, model: Any, apart: bool, vocabulary: int, reference: Reference) -> None:
        self._causal = CausalObjective(model, apart)
        self._vocabulary = vocabulary
        self._ask: Any = reference

    def __call__(self, batch: DistillationBatch) -> torch.Tensor:
        """Log-probabilities, (places, vocabulary), in fp32."""
        (asked,) = self.asked([batch], None)
        assert asked.asked is not None
        return asked.asked[1]

    def asked(self, batches: list[DistillationBatch], k: int | None) -> list[DistillationBatch]:
        """The micro-batches with the teacher's k likeliest tokens, or all log-probabilities."""
        width = self._vocabulary if k is None else k + 1

        def compute(model: Any, part: DistillationBatch) -> Answers:
            logits = full_logits_at(model(**self._causal.inputs(part)).logits, part.places)
            log_probs = logits[:, : self._vocabulary].float().log_softmax(-1)
            return (None, log_probs) if k is None else likeliest(log_probs, k)

        def absent(part: DistillationBatch) -> Answers:
            nothing = torch.zeros((), device=part.places.device)
            tokens = None if k is None else nothing.expand(len(part.places), k)
            return tokens, nothing.expand(len(part.places), width)

        answers = self._ask(batches, compute, absent)
        return [replace(b, asked=answer) for b, answer in zip(batches, answers, strict=True)]


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

    def prepare(self, batches: list[DistillationBatch]) -> list[DistillationBatch]:
        """The micro-batches with the teacher's answers, unless those are stored."""
        if self._teacher is None:
            return batches
        k = self._settings.top_k
        return self._teacher.asked(batches, None if k == self._vocabulary else k)

    def __call__(self, model: Any, batch: DistillationBatch) -> Loss:
        """The loss of a prepared micro-batch, which knows the places of its trained tokens."""
        logits = full_logits_at(model(**self._causal.inputs(batch)).logits, batch.places)
        student = logits.float().log_softmax(-1)
        plain = -student.gather(-1, batch.labels.flatten()[batch.places][:, None])[:, 0]
        kl = self._divergence(student[:, : self._vocabulary], batch)
        weight = self._settings.weight
        losses = weight * kl + (1 - weight) * plain
        sources = None if batch.sources is None else batch.sources.flatten()[batch.places]
        loss = sum_by_source(losses, torch.ones_like(losses), sources, batch.source_count)
        figures = {"loss_teacher": kl.detach().sum(), "loss_plain": plain.detach().sum()}
        return replace(loss, figures=figures)

    def _divergence(self, student: torch.Tensor, batch: DistillationBatch) -> torch.Tensor:
        temperature = self._settings.temperature
        tokens, answers = batch.asked or (batch.likeliest, batch.log_probs)
        assert answers is not None, "the batch was not prepared"
        if tokens is None:
            return divergence(answers, student, temperature)
        if tokens.shape[-1] == self._vocabulary:  # stored answers of all tokens: no others
            return divergence(answers[:, :-1], student.gather(-1, tokens), temperature)
        return divergence(answers, outcomes(student.log_softmax(-1), tokens), temperature)


def check_teacher_axes(run: Run, teacher: Teacher, ranks: int) -> None:
    """Raises a UserError if the run's axes do not divide a teacher that is asked while training."""
    if teacher.answers is not None:
        return
    config = teacher.source.config
    try:
        check_model_axes(frozen_run(run, config), config, ranks)
    except UserError as error:
        problem = f"{error.problem} (the teacher's)"
        remedy = f"{error.remedy}, or ask the teacher once (objective.cache: true and top_k)"
        raise UserError(error.field, error.value, problem, remedy) from None


def make_distill(
    job: ResolvedRun, world: World, sharded: ShardedModel, apart: bool, say: Callable[[str], None]
) -> DistillObjective:
    """The objective, with the teacher loaded or, with `cache`, all of its answers stored."""
    from shardwise.distributed.mesh import all_shard
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
            plain = job.run.model_copy(update={"parallel": Parallel()})
            asked = load_teacher(replace(job, run=plain), all_shard(world), say)
            ask_teacher(job, world, asked, missing, say)
    return DistillObjective(sharded.model, apart, settings, source.vocabulary, teacher)


def load_teacher(job: ResolvedRun, world: World, say: Callable[[str], None]) -> TeacherLogProbs:
    """The teacher, frozen, sharded and checked like the trained model."""
    from shardwise.parallel.selfcheck import CallsWhole, UnshardedModel, check_documents

    assert job.teacher is not None
    source = job.teacher.source
    frozen = build_frozen(source, job.run, world)
    model: Any = frozen.sharded.model
    tiny = frozen.context.tiny
    whole: CallsWhole = frozen.sharded if tiny is None else UnshardedModel(tiny)
    device = world.device if tiny is None else whole.device
    vocabulary = vocabulary_size(whole.model)
    apart = check_documents(whole, vocabulary, replace(job, source=source), device, say)
    if frozen.context.context is not None:
        frozen.context.context.check_packing(bool(job.run.data.packing))
    model.eval()
    return TeacherLogProbs(model, apart, job.teacher.vocabulary, frozen.answers)
