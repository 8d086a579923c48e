"""The teacher model of a distillation run: found and checked before any process starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.config.schema import Model, Run
from shardwise.core.cache import cache_root
from shardwise.core.errors import UserError
from shardwise.data.distillation_batch import TeacherAnswers
from shardwise.nn.models.adapt import on_rows_of
from shardwise.nn.models.build import vocabulary_size
from shardwise.nn.models.source import ModelSource, find_model, weights_key

FIELD = "objective.teacher"
ANSWERS = 1  # raised when the same teacher's answers are stored otherwise


@dataclass(frozen=True)
class Teacher:
    """Its files, size and vocabulary (shared with the student), and where its answers are cached, if they are."""

    source: ModelSource
    parameters: int
    vocabulary: int
    answers: TeacherAnswers | None


def find_teacher(
    run: Run, tokenizer: Any, vocabulary: int, say: Callable[[str], None] = lambda _: None
) -> Teacher | None:
    """Returns the teacher of a run that has one; raises UserError if it cannot teach this model."""
    settings = run.objective
    if settings == "auto" or settings.type != "distill":
        return None
    from shardwise.nn.models.build import build_on_meta
    from shardwise.nn.models.readable import readable

    name = settings.teacher
    try:
        source = find_model(Model(name=name, trust_remote_code=run.model.trust_remote_code), say, "causal")
        source = on_rows_of(run, source)
        model = build_on_meta(source)
        source = readable(source, model, say)
        teacher_tokenizer = source.load_tokenizer()
    except UserError as error:
        raise UserError(FIELD, name, error.problem, error.remedy) from None
    _check_vocabulary(teacher_tokenizer, tokenizer, name)
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if limit and run.data.sequence_length > limit:
        problem = f"has {limit} positions, data.sequence_length is {run.data.sequence_length}"
        raise UserError(FIELD, name, problem, f"set data.sequence_length to {limit} or less, or use another teacher")
    common = min(vocabulary, vocabulary_size(model))
    if settings.top_k is not None and settings.top_k > common:
        problem = f"both models know {common} tokens"
        raise UserError("objective.top_k", settings.top_k, problem, "lower it, or leave it out to match all")
    answers = None
    if settings.cache:
        assert settings.top_k is not None and source.weights is not None
        key_parts = [ANSWERS, weights_key(source.weights), settings.top_k, common, run.precision]
        key = hashlib.sha256(repr(key_parts).encode()).hexdigest()[:16]
        answers = TeacherAnswers(cache_root() / "answers" / key, settings.top_k)
    return Teacher(source, sum(p.numel() for p in model.parameters()), common, answers)


def _check_vocabulary(teacher_tokenizer: Any, tokenizer: Any, name: str) -> None:
    """The same tokens must have the same ids, or the teacher's distribution would be over other tokens."""
    teacher_vocabulary = teacher_tokenizer.get_vocab()
    vocabulary = tokenizer.get_vocab()
    if teacher_vocabulary == vocabulary:
        return
    word = next(
        w
        for w in sorted(teacher_vocabulary.keys() | vocabulary.keys())
        if teacher_vocabulary.get(w) != vocabulary.get(w)
    )
    teacher_id, own_id = (v.get(word, "no token") for v in (teacher_vocabulary, vocabulary))
    problem = f"has another vocabulary ({word!r} is {teacher_id} there and {own_id} in the model)"
    remedy = "use a teacher with the model's own tokenizer, e.g. a larger model of its family"
    raise UserError(FIELD, name, problem, remedy)
