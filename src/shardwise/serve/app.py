"""The HTTP side of `shardwise serve`: authentication, validation, and how responses and errors are sent.

Every check is made before a request reaches the engine, and every failure is a JSON error in OpenAI's form. Paths are
only compared, never opened; there are no pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from shardwise.serve.engine import BUSY, FAILED, STOPPING, BatchingEngine
from shardwise.serve.models import Models, Served
from shardwise.serve.prompts import make_asks
from shardwise.serve.protocol import BadRequest, ChatRequest, TextRequest, parse
from shardwise.serve.rate import Rate
from shardwise.serve.reply_json import Chat, ReplyForm, ReplyShape, Text, Usage
from shardwise.serve.rows import AnswerEnded, AnswerRow, Ask, Event, Failed, TextPiece

log = logging.getLogger("shardwise.serve")

BODY_LIMIT = 4 << 20  # bytes; a context of 128k tokens is about 0.5 MB of English
BODY_SECONDS = 30.0
LONGEST_HEADERS = 16 << 10  # bytes in all; the server stops those that never end
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Policy:
    """Who may send requests, and how large."""

    key: str | None = None
    max_tokens: int = 4096
    rate: Rate | None = None
    local_only: bool = True
    body_limit: int = BODY_LIMIT
    log_prompts: bool = False


@dataclass
class AnswerStream:
    """The answers to one request, as events arrive from the engine."""

    form: ReplyForm
    shape: ReplyShape
    asks: list[Ask]
    usage: Usage
    scored: bool
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    rows: list[AnswerRow] = field(default_factory=list)

    def submit(self, engine: BatchingEngine) -> None:
        """Submits the request to the engine."""
        loop = asyncio.get_running_loop()

        def emit_for(index: int) -> Callable[[Event], None]:
            def emit(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server has left
                    loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

            return emit

        rows = engine.submit(self.asks, [emit_for(index) for index in range(len(self.asks))])
        if rows is None:
            raise BadRequest(503, STOPPING if engine.stopping else BUSY, code="overloaded", wait=5)
        self.rows = rows

    def cancel(self) -> None:
        """Cancels all rows: the client is gone."""
        for row in self.rows:
            row.cancelled = True

    async def each(self) -> AsyncIterator[tuple[int, TextPiece | AnswerEnded]]:
        """Yields events until all answers have ended; the first failure ends them all."""
        remaining = len(self.asks)
        while remaining:
            index, event = await self.events.get()
            if isinstance(event, Failed):
                raise BadRequest(event.status, event.message)
            if isinstance(event, AnswerEnded):
                remaining -= 1
                self.usage.completion += event.tokens
            yield index, event

    async def whole(self) -> dict[str, Any]:
        """Returns the JSON of the complete response."""
        pieces: list[list[TextPiece]] = [[] for _ in self.asks]
        reasons = [""] * len(self.asks)
        async for index, event in self.each():
            if isinstance(event, TextPiece):
                pieces[index].append(event)
            else:
                reasons[index] = event.reason
        choices = [self.shape.whole(self.form, i, p, reasons[i], self.scored) for i, p in enumerate(pieces)]
        return self.form.wrap(choices, usage=self.usage.json())

    async def chunks(self, with_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yields the JSON of a stream's chunks."""
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        for index in range(len(self.asks)):
            if opening := self.shape.opening(self.form, index):
                yield self.form.wrap([opening], **extra)
        async for index, event in self.each():
            if isinstance(event, TextPiece):
                choice = self.shape.part(self.form, index, event, self.scored)
            else:
                choice = self.shape.closing(self.form, index, event.reason)
            yield self.form.wrap([choice], **extra)
        if with_usage:
            yield self.form.wrap([], usage=self.usage.json())


class Api:
    """The HTTP routes."""

    def __init__(self, models: Models, engine: BatchingEngine, policy: Policy) -> None:
        self._models = models
        self._engine = engine
        self._policy = policy
        self._tokenizing = asyncio.Lock()

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes = [
            Route("/health", self._guard(self.health, open_to_all=True), methods=["GET"]),
            Route("/v1/models", self._guard(self.list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guard(self.show_model), methods=["GET"]),
            Route("/v1/chat/completions", self._guard(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guard(self.complete), methods=["POST"]),
        ]
        handlers: Any = {HTTPException: _http_error, Exception: _bug}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def health(self, request: Request) -> Response:
        """Whether the server is up, and its load."""
        running, waiting = self._engine.load()
        status = "stopping" if self._engine.stopping else "ok"
        return JSONResponse({"status": status, "running": running, "waiting": waiting})

    async def list_models(self, request: Request) -> Response:
        """Lists the models."""
        return JSONResponse({"object": "list", "data": [_card(served) for served in self._models]})

    async def show_model(self, request: Request) -> Response:
        """Returns one model."""
        return JSONResponse(_card(self._find(request.path_params["name"])))

    async def chat(self, request: Request) -> Response:
        """Handles `/v1/chat/completions`."""
        chat_request = parse(ChatRequest, await self._json(request))
        kind = "chat.completion.chunk" if chat_request.stream else "chat.completion"
        return await self._answer(request, chat_request, kind, Chat())

    async def complete(self, request: Request) -> Response:
        """Handles `/v1/completions`."""
        text_request = parse(TextRequest, await self._json(request))
        return await self._answer(request, text_request, "text_completion", Text())

    async def _answer(
        self, request: Request, completion: ChatRequest | TextRequest, kind: str, shape: ReplyShape
    ) -> Response:
        served = self._find(completion.model)
        async with self._tokenizing:  # one at a time: a tokenizer is not made for several threads
            limits = self._policy.max_tokens, self._engine.limits.queue
            asks, prompt_tokens = await asyncio.to_thread(make_asks, served, completion, *limits)
        answer = AnswerStream(ReplyForm(served.name, served.tokenizer, kind), shape, asks, Usage(prompt_tokens), False)
        answer.scored = completion.scores is not None
        answer.submit(self._engine)
        if self._policy.log_prompts:
            log.info("prompt %s", json.dumps(served.tokenizer.decode(asks[0].prompt), ensure_ascii=False))
        request_log = _Log(request.url.path, answer)
        if completion.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            stream = _events(answer, completion.with_usage, request_log)
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        try:
            response_body = await _unless_gone(request, answer.whole())
            request_log.write("200")
            return JSONResponse(response_body)
        except BadRequest as refused:
            request_log.write(str(refused.status))
            raise
        except ClientDisconnect:
            request_log.write("client left")
            return Response(status_code=499)
        finally:
            answer.cancel()

    def _find(self, name: str) -> Served:
        served = self._models.get(name)
        if served is None:
            names = ", ".join(model.name for model in self._models)
            message = f"the model {name[:200]!r} does not exist here; there is {names}"
            raise BadRequest(404, message, "model", "model_not_found")
        return served

    async def _json(self, request: Request) -> Any:
        """The body, limited in size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Also keeps other sites' pages out: a browser sends JSON elsewhere only after asking, and we never agree.
        if kind != "application/json":
            raise BadRequest(400, "send the body as Content-Type: application/json", code="invalid_content_type")
        limit = self._policy.body_limit
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise BadRequest(413, f"the body is larger than {limit} bytes", code="request_too_large")
        except TimeoutError:
            raise BadRequest(408, f"the body did not come within {BODY_SECONDS:g} seconds") from None
        try:
            return json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadRequest(400, f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from None

    def _guard(
        self, handler: Callable[[Request], Awaitable[Response]], open_to_all: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind API key and rate limit, with errors as JSON."""

        async def guarded(request: Request) -> Response:
            try:
                if sum(len(name) + len(value) for name, value in request.scope["headers"]) > LONGEST_HEADERS:
                    raise BadRequest(431, "the headers are too long", code="headers_too_large")
                if not open_to_all:
                    self._admit(request)
                return await handler(request)
            except BadRequest as refused:
                headers = {} if refused.wait is None else {"Retry-After": str(refused.wait)}
                if refused.status in (408, 413):
                    headers["Connection"] = "close"  # the rest of the body is not read
                return JSONResponse(refused.body(), refused.status, headers)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _admit(self, request: Request) -> None:
        policy = self._policy
        if policy.key is not None:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), policy.key.encode()):
                raise BadRequest(401, "the API key is missing or wrong", code="invalid_api_key")
        elif policy.local_only and _host(request) not in LOOPBACK:
            # A web page whose name was pointed at this machine would otherwise be let in by the user's own browser.
            raise BadRequest(403, "this server answers under the names of this machine only", code="wrong_host")
        if policy.rate is not None and request.method == "POST":
            client = request.client.host if request.client else ""
            if wait := policy.rate.allow(client):
                raise BadRequest(
                    429, f"too many requests; try again in {wait} s", code="rate_limit_exceeded", wait=wait
                )


@dataclass
class _Log:
    """One log line per request, without its content."""

    path: str
    answer: AnswerStream
    began: float = field(default_factory=time.perf_counter)

    def write(self, outcome: str) -> None:
        usage = self.answer.usage
        seconds = time.perf_counter() - self.began
        counts = f"{usage.prompt} prompt tokens, {usage.completion} new"
        log.info("%s %s · %s · %s · %.1f s", self.path, outcome, self.answer.form.model, counts, seconds)


async def _events(answer: AnswerStream, with_usage: bool, request_log: _Log) -> AsyncIterator[bytes]:
    """The chunks as server-sent events. A failure is the last event, since the status has been sent already."""
    outcome = "client left"
    try:
        async for chunk in answer.chunks(with_usage):
            yield b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
        outcome = "200"
        yield b"data: [DONE]\n\n"
    except BadRequest as refused:
        outcome = f"broken off: {refused}"
        yield b"data: " + json.dumps(refused.body()).encode() + b"\n\n"
    finally:
        answer.cancel()
        request_log.write(outcome)


async def _unless_gone(request: Request, work: Any) -> Any:
    """Returns the result of `work`, unless the client disconnects first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0].lower()


def _card(served: Served) -> dict[str, Any]:
    return {
        "id": served.name, "object": "model", "created": served.created, "owned_by": "shardwise",
        "context_length": served.context,
    }  # fmt: skip


async def _http_error(request: Request, error: HTTPException) -> Response:
    words = {404: "there is no such path", 405: "this path takes another method"}
    return JSONResponse(
        BadRequest(error.status_code, words.get(error.status_code, error.detail)).body(), error.status_code
    )


async def _bug(request: Request, error: Exception) -> Response:
    return JSONResponse(BadRequest(500, FAILED).body(), 500)
