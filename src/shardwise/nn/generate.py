"""Generates an answer to a conversation with the model's own chat template.

A fine-tuned model looks broken when the prompt differs by one token from what it was trained on, or when nothing tells
it to stop. So this file owns those two things, prompt and stop tokens, and leaves the decoding loop to
`transformers.generate`. Temperature 0 is greedy and exactly reproducible.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from shardwise.core.errors import UserError

Message = dict[str, Any]  # role and content, and whatever else the chat template reads
NO_TEMPLATE = "the tokenizer has no chat template: the last message is completed as plain text, nothing else is seen"


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled; the defaults are greedy."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError("max_tokens", self.max_tokens, "an answer needs room", "give a whole number from 1 up")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError("temperature", self.temperature, "out of range", "give 0 (greedy) or more, e.g. 0.7")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p", self.top_p, "out of range", "give a share above 0 and up to 1, e.g. 0.9")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UserError("repetition_penalty", self.repetition_penalty, "out of range", "give 1 (off) or e.g. 1.1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError("seed", self.seed, "out of range", "give a whole number from 0 up")


@dataclass(frozen=True)
class Reply:
    """One answer, its token counts and time, and why it ended."""

    text: str
    prompt_tokens: int
    tokens: int
    seconds: float
    ended: Literal["stop", "length", "context", "interrupted"]


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Returns the assistant's answer to a conversation, streamed to `on_text`; Ctrl-C ends it early."""
    _warn_without_template(tokenizer)
    return reply(model, tokenizer, messages, sampling, on_text).text


def reply(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
) -> Reply:
    """Like `answer`, with the token counts, the time taken and the reason it ended."""
    prompt = prompt_ids(tokenizer, messages)
    room = room_after(model, prompt)
    limit = sampling.max_tokens if room is None else min(sampling.max_tokens, room)
    stops = stop_ids(tokenizer, model)
    pieces = TextPieces(tokenizer, stops, on_text)
    started = time.perf_counter()
    interrupted = False
    try:
        _generate(model, tokenizer, [prompt], limit, sampling, stops, pieces)
    except KeyboardInterrupt:
        interrupted = True
    ended: Literal["stop", "length", "context", "interrupted"] = "length" if limit == sampling.max_tokens else "context"
    if interrupted:
        ended = "interrupted"
    elif pieces.stopped:
        ended = "stop"
    return Reply("".join(pieces.texts), len(prompt), len(pieces.ids), time.perf_counter() - started, ended)


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    sampling: Sampling,
    batch_size: int = 8,
) -> list[str]:
    """Returns the answers to separate one-turn questions, as if asked one by one; greedy ones share a batch."""
    conversations: list[list[Message]] = [[{"role": "user", "content": question}] for question in questions]
    return replies(model, tokenizer, conversations, sampling, batch_size)


def replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[Message]],
    sampling: Sampling,
    batch_size: int = 8,
) -> list[str]:
    """Returns the next answer of each of separate conversations; see `answers`."""
    _warn_without_template(tokenizer)
    prompts = [prompt_ids(tokenizer, messages) for messages in conversations]
    stops = stop_ids(tokenizer, model)
    texts = [""] * len(conversations)
    batched: list[int] = []
    for i, prompt in enumerate(prompts):
        room = room_after(model, prompt)
        # Sampling draws from one random stream per batch, and the repetition penalty counts padding as a repeated
        # token: neither would give in a batch what it gives alone. A row near the end of the context has its own limit.
        greedy = sampling.temperature == 0 and sampling.repetition_penalty == 1
        if greedy and (room is None or room >= sampling.max_tokens):
            batched.append(i)
        else:
            texts[i] = reply(model, tokenizer, conversations[i], sampling).text
    batched.sort(key=lambda i: len(prompts[i]))  # neighbours of like length waste little padding
    for start in range(0, len(batched), batch_size):
        rows = batched[start : start + batch_size]
        new = _generate(model, tokenizer, [prompts[i] for i in rows], sampling.max_tokens, sampling, stops, None)
        for i, ids in zip(rows, new, strict=True):
            end = next((index for index, token in enumerate(ids) if token in stops), len(ids))
            texts[i] = _decode(tokenizer, ids[:end])
    return texts


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> set[int]:
    """Returns every token id that ends an assistant turn: the tokenizer's, the model's, and the chat template's own."""
    stops: set[int] = set()
    settings: Any = getattr(model, "generation_config", None)
    for ids in (tokenizer.eos_token_id, getattr(settings, "eos_token_id", None)):
        if ids is not None:
            stops.update([ids] if isinstance(ids, int) else ids)
    if tokenizer.chat_template:
        sentinel = "sentinel"
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": sentinel}]
        turn_end = _render(tokenizer, turns, generation_prompt=False).rpartition(sentinel)[2]
        added = tokenizer.added_tokens_decoder
        # Some vocabularies add runs of blanks as tokens; a blank after the answer does not end the turn.
        special_ids = {i for i, token in added.items() if token.content.strip()} | set(tokenizer.all_special_ids)
        stops.update([i for i in _encode(tokenizer, turn_end, special=False) if i in special_ids][:1])
    return stops


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    """Returns a conversation as the chat template formats it, up to where the answer begins."""
    if not tokenizer.chat_template:
        raise UserError("chat", True, "the tokenizer has no chat template", "leave it out")
    return _render(tokenizer, messages, generation_prompt=True)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Returns the token ids of a conversation, up to where its answer begins."""
    if tokenizer.chat_template:
        # The template writes BOS itself where the model wants one; the tokenizer must not add a second.
        return _encode(tokenizer, _render(tokenizer, messages, generation_prompt=True, tools=tools), special=False)
    return text_ids(tokenizer, next((m["content"] for m in reversed(messages) if m["role"] == "user"), ""))


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a text to be continued, without a chat template."""
    return _encode(tokenizer, text, special=True)


def context_length(model: PreTrainedModel) -> int | None:
    """Returns the maximum length of prompt and answer together; None if the config sets no limit."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


@dataclass
class TextPieces(BaseStreamer):
    """Streamer that receives token ids and emits text as soon as it is complete characters."""

    tokenizer: PreTrainedTokenizerBase
    stops: set[int]
    on_text: Callable[[str], None] | None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stopped: bool = False
    _prompt_passed: bool = False
    _start: int = 0
    _read: int = 0

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: the full prompt first, then each new token."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        for token in value.flatten().tolist():
            self.add(token)

    def add(self, token: int) -> None:
        """Appends the next token of the answer."""
        if token in self.stops:
            self.stopped = True
        else:
            self.ids.append(token)
            self._pass_on(final=False)

    def end(self) -> None:
        """Called by `generate` when it is done: emits whatever was held back."""
        self._pass_on(final=True)

    def _pass_on(self, final: bool) -> None:
        # Decoding a token alone loses the space before it in some vocabularies, so it is decoded behind the tokens of
        # the previous piece, whose text is then cut off. A trailing U+FFFD is a character that is still incomplete.
        before = _decode(self.tokenizer, self.ids[self._start : self._read])
        text = _decode(self.tokenizer, self.ids[self._start :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return
        self._start, self._read = self._read, len(self.ids)
        self.texts.append(text[len(before) :])
        if self.on_text is not None:
            self.on_text(self.texts[-1])


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    limit: int,
    sampling: Sampling,
    stops: set[int],
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """New token ids per prompt, including stop tokens and what follows them."""
    pad = tokenizer.pad_token_id
    if not isinstance(pad, int):
        pad = min(stops, default=0)  # masked in the prompt and cut off in the answer: any id of the vocabulary serves
    decoding: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        # top_k is 50 in transformers unless it is switched off.
        decoding = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    settings: Any = GenerationConfig  # an untyped class
    config = settings(
        max_new_tokens=limit,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=sorted(stops) or None,
        pad_token_id=pad,
        **decoding,
    )
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with _settled(model, config), _seeded(sampling.seed, model.device):
        generate: Any = model.generate
        try:
            out = generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer)
        except torch.OutOfMemoryError:
            size = f"{len(prompts)} × {width} tokens" if len(prompts) > 1 else f"{width} tokens"
            problem = f"the device's memory is too small for it and {limit} new tokens"
            raise UserError("prompt", size, problem, "shorten the conversation or lower max_tokens") from None
    new_ids: list[list[int]] = out[:, width:].tolist()
    return new_ids


@contextmanager
def _settled(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """The model without dropout and with our generation settings only, restored afterwards."""
    # generate() fills what we leave open from the model's own generation_config (top_k, min_p, n-gram bans, …): a
    # greedy answer would not be greedy. Swapping the attribute is the only published way to keep that out.
    holder: Any = model
    training = model.training
    previous = holder.generation_config
    try:
        holder.generation_config = config
        holder.eval()
        yield
    finally:
        holder.generation_config = previous
        if training:
            model.train()


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random draws that depend on the seed alone and leave the caller's random state unchanged."""
    if seed is None:
        yield
        return
    on_host = device.type == "cpu"
    kind = "cuda" if on_host else device.type
    with torch.random.fork_rng(devices=[] if on_host else [device.index or 0], device_type=kind):
        torch.manual_seed(seed)
        yield


def room_after(model: PreTrainedModel, prompt: list[int]) -> int | None:
    """Returns the maximum length of the answer; raises UserError if there is no prompt or no room."""
    if not prompt:
        raise UserError("prompt", None, "is empty", "write a question")
    context = context_length(model)
    if context is None:
        return None
    if len(prompt) >= context:
        problem = f"does not fit in the model's context of {context} tokens, which the answer shares"
        raise UserError("prompt", f"{len(prompt)} tokens", problem, "shorten it or leave out earlier turns")
    return context - len(prompt)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    options: dict[str, Any] = {"tools": tools} if tools else {}
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **options
        )
    except (TemplateError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        roles = ", ".join(m["role"] for m in messages)
        remedy = "this model's template may allow no system message, or ask for turns that alternate"
        raise UserError("messages", roles, f"the chat template refuses them: {error}", remedy) from None
    return str(text)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    # Clean-up would delete blanks that were already streamed.
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _warn_without_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        warnings.warn(NO_TEMPLATE, stacklevel=1)  # at one place, so that Python shows it once
