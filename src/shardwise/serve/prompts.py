"""From a request to what the engine is given: token ids that fit, and the maximum length of the answer."""

from __future__ import annotations

from typing import Any

from shardwise.core.errors import UserError
from shardwise.nn.generate import prompt_ids, room_after, text_ids
from shardwise.nn.models.build import vocabulary_size
from shardwise.serve.models import Served
from shardwise.serve.protocol import BadRequest, ChatRequest, TextRequest
from shardwise.serve.rows import Ask


def make_asks(
    served: Served, request: ChatRequest | TextRequest, limit: int, most_answers: int
) -> tuple[list[Ask], int]:
    """Returns one ask for each answer (`n` for each prompt), and the tokens of all prompts; raises BadRequest."""
    count = request.n * (1 if isinstance(request, ChatRequest) else len(request.prompts))
    if count > most_answers:
        raise BadRequest(
            400, f"n: {count} answers are asked for at once, and {most_answers} are the most", "n", "invalid_value"
        )
    if isinstance(request, ChatRequest):
        prompts = [_conversation(served, request)]
    else:
        prompts = [_text(served, prompt) for prompt in request.prompts]
    if not prompts:
        raise BadRequest(400, "prompt: is empty", "prompt", "invalid_value")
    asks = []
    for prompt in prompts:
        size = _longest(served, prompt, request.wanted, limit)
        for choice in range(request.n):
            asks.append(Ask(served, prompt, request.sampling(size, choice), request.stops, request.scores))
    return asks, sum(map(len, prompts))


def _longest(served: Served, prompt: list[int], requested: int | None, limit: int) -> int:
    """Maximum number of tokens of the answer."""
    try:
        room = room_after(served.model, prompt)
    except UserError as error:
        raise BadRequest(400, f"the prompt {_problem(error)}", "prompt", "context_length_exceeded") from None
    if requested is None:
        return limit if room is None else min(limit, room)
    if requested > limit:
        raise BadRequest(400, f"max_tokens: this server gives at most {limit}", "max_tokens", "invalid_value")
    if room is not None and requested > room:
        message = (
            f"the context is {served.context} tokens; the prompt has {len(prompt)} and {requested} are asked for the "
            f"answer: shorten the prompt or ask for {room} at most"
        )
        raise BadRequest(400, message, "max_tokens", "context_length_exceeded")
    return requested


def _conversation(served: Served, request: ChatRequest) -> list[int]:
    if not served.tokenizer.chat_template:
        message = f"{served.name} has no chat template; use /v1/completions"
        raise BadRequest(400, message, "model", "no_chat_template")
    tools = request.tools if request.tool_choice != "none" else None
    if tools and not served.takes_tools:
        raise BadRequest(400, f"tools: the chat template of {served.name} takes none", "tools", "unsupported_value")
    messages = [message.plain() for message in request.messages]
    try:
        return prompt_ids(served.tokenizer, messages, tools)
    except UserError as error:
        raise BadRequest(400, f"messages: {_problem(error)}", "messages", "invalid_value") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        # Templates are programs, and some stumble over messages that their authors did not think of.
        message = f"messages: the chat template cannot take them ({error})"
        raise BadRequest(400, message[:500], "messages", "invalid_value") from None


def _text(served: Served, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        try:
            return text_ids(served.tokenizer, prompt)
        except (TypeError, ValueError) as error:
            raise BadRequest(400, f"prompt: is no text ({error})", "prompt", "invalid_value") from None
    vocabulary = vocabulary_size(served.model)
    if not all(0 <= token < vocabulary for token in prompt):
        raise BadRequest(400, f"prompt: token ids go from 0 to {vocabulary - 1}", "prompt", "invalid_value")
    return list(prompt)


def _problem(error: UserError) -> str:
    value = f"({error.value}) " if isinstance(error.value, str) and error.field == "prompt" else ""
    return f"{value}{error.problem}"
