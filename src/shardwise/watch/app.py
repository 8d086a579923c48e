"""HTTP server of `shardwise watch`: access control, request validation and responses.

It is read-only. Requests name runs by ids assigned by the finder and ranks by numbers that have files; no part of a
request becomes a path. What runs have written (names, logs, samples) is sent as JSON or plain text, and the page
inserts it as text, so that none of it is ever HTML; the content security policy would stop anything that slipped
through.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from shardwise.watch.files import STATIC, page_file
from shardwise.watch.finder import Finder
from shardwise.watch.folder import RunFolder, differences
from shardwise.watch.prometheus import exposition

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LONGEST_QUERY = 2048  # bytes
LONGEST_HEADERS = 16 << 10  # bytes in all; the server stops those that never end
MOST_COMPARED = 32
POINTS = (16, 1500, 6000)  # least, usual, most of a curve
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class AccessControl:
    """Access control: anyone with the token, or without one only this machine."""

    token: str | None = None
    local_only: bool = True
    cookie: str = "shardwise_watch"  # with the port in its name: a browser keeps one jar for all ports of a host


class PageRefused(Exception):
    """An HTTP error response."""

    def __init__(self, status: int, words: str) -> None:
        self.status, self.words = status, words
        super().__init__(words)


class Pages:
    """Routes of the dashboard."""

    def __init__(self, finder: Finder, door: AccessControl) -> None:
        self._finder, self._door = finder, door

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes = {
            "/": self.page,
            "/static/{name:path}": self.static,
            "/metrics": self.metrics,
            "/api/runs": self.runs,
            "/api/compare": self.compare,
            "/api/runs/{run}": self.detail,
            "/api/runs/{run}/series": self.series,
            "/api/runs/{run}/hosts": self.hosts,
            "/api/runs/{run}/samples": self.samples,
            "/api/runs/{run}/log/{rank:int}": self.log,
        }
        handlers: Any = {HTTPException: _http_error, Exception: _bug}
        return Starlette(
            routes=[Route(path, self._guard(handler), methods=["GET"]) for path, handler in routes.items()],
            exception_handlers=handlers,
            middleware=[Middleware(GZipMiddleware, minimum_size=2000)],
        )

    def page(self, request: Request) -> Response:
        """The dashboard itself; a token in the address becomes a cookie, and is removed from the address."""
        if self._door.token is not None and "token" in request.query_params:
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            answer = RedirectResponse("/" + (f"?{urlencode(rest)}" if rest else ""), 303)
            answer.set_cookie(self._door.cookie, self._door.token, httponly=True, samesite="strict", path="/")
            return answer
        return Response(page_file("index.html"), media_type="text/html")

    def static(self, request: Request) -> Response:
        """Scripts and styles, from a fixed list."""
        name = request.path_params["name"]
        if name not in STATIC:
            raise PageRefused(404, "there is no such path")
        return Response(page_file(name), media_type=STATIC[name])

    def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return PlainTextResponse(
            exposition(self._finder.runs()), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def runs(self, request: Request) -> Response:
        """Overview of all runs."""
        return JSONResponse([run.overview() for run in self._finder.runs()])

    def compare(self, request: Request) -> Response:
        """Settings in which the given runs differ."""
        keys = [key for key in request.query_params.get("runs", "").split(",") if key][:MOST_COMPARED]
        return JSONResponse(differences([self._find(key) for key in keys]))

    def detail(self, request: Request) -> Response:
        """One run, without its curves."""
        return JSONResponse(self._run(request).detail())

    def series(self, request: Request) -> Response:
        """Curves of one run: all, new points, or a range."""
        query = request.query_params
        least, usual, limit = POINTS
        points = min(limit, max(least, int(_number(query.get("points"), usual))))
        after = {kind: _number(query.get(f"after_{kind}"), -math.inf) for kind in ("train", "eval")}
        generation = int(_number(query.get("generation"), -1))
        first, last = _number(query.get("first"), -math.inf), _number(query.get("last"), math.inf)
        return JSONResponse(self._run(request).series(points, generation, after, first, last))

    def hosts(self, request: Request) -> Response:
        """Host metrics of one run over time."""
        return JSONResponse(self._run(request).hosts(_number(request.query_params.get("after"), -math.inf)))

    def samples(self, request: Request) -> Response:
        """Samples generated during training."""
        return JSONResponse(self._run(request).samples())

    def log(self, request: Request) -> Response:
        """The end of a rank's log."""
        lines = self._run(request).log(request.path_params["rank"], 400)
        if lines is None:
            raise PageRefused(404, "there is no such rank")
        return JSONResponse(lines)

    def _run(self, request: Request) -> RunFolder:
        return self._find(request.path_params["run"])

    def _find(self, key: str) -> RunFolder:
        run = self._finder.get(key)
        if run is None:
            raise PageRefused(404, "there is no such run")
        return run

    def _guard(self, handler: Callable[[Request], Response]) -> Callable[[Request], Any]:
        """Wraps a handler: access control, a worker thread, errors as text and strict headers."""

        async def guarded(request: Request) -> Response:
            try:
                self._admit(request)
                answer = await run_in_threadpool(handler, request)
            except PageRefused as refused:
                answer = PlainTextResponse(refused.words + "\n", refused.status)
                if refused.status == 401:
                    answer.headers["WWW-Authenticate"] = "Bearer"
            for name, value in HEADERS.items():
                answer.headers.setdefault(name, value)
            return answer

        return guarded

    def _admit(self, request: Request) -> None:
        if len(request.scope.get("query_string", b"")) > LONGEST_QUERY:
            raise PageRefused(414, "the address is too long")
        if sum(len(name) + len(value) for name, value in request.scope["headers"]) > LONGEST_HEADERS:
            raise PageRefused(431, "the headers are too long")
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            raise PageRefused(413, "send no body")
        # A web page whose name was pointed at this machine would otherwise be let in by the user's own browser.
        if self._door.local_only and _host(request) not in LOOPBACK:
            raise PageRefused(403, "this server answers under the names of this machine only")
        if self._door.token is not None and not any(
            hmac.compare_digest(credential.encode(), self._door.token.encode())
            for credential in self._credentials(request)
        ):
            raise PageRefused(401, "the token is missing or wrong: open the address that the command printed")

    def _credentials(self, request: Request) -> list[str]:
        scheme, _, word = request.headers.get("authorization", "").partition(" ")
        bearer = word.strip() if scheme.lower() == "bearer" else ""
        in_address = request.query_params.get("token", "") if request.url.path == "/" else ""
        return [request.cookies.get(self._door.cookie, ""), bearer, in_address]


def _number(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        raise PageRefused(400, "a number is needed") from None
    if not math.isfinite(value):
        raise PageRefused(400, "a finite number is needed")
    return value


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0].lower()


async def _http_error(request: Request, error: HTTPException) -> Response:
    words = {404: "there is no such path", 405: "only GET is answered"}.get(error.status_code, error.detail)
    return PlainTextResponse(f"{words}\n", error.status_code, headers=HEADERS)


async def _bug(request: Request, error: Exception) -> Response:
    return PlainTextResponse("an error of this server's own; see its terminal\n", 500, headers=HEADERS)
