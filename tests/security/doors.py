"""HTTP: the dashboard, the model server, and the meeting point of workers that train apart."""

from __future__ import annotations

import json

from security.ground import EVIL, SECRET, TOKEN, GotThrough, Ground, Reply, attempt, patched, request, say

WATCH, SERVE, APART = "watch", "serve", "apart"
BEARER = f"Bearer {TOKEN}"
JSON = "application/json"


# The dashboard


@attempt(WATCH, "no token")
def _(ground: Ground) -> str:
    return say(ground.watch, request("GET", "/api/runs")).refusal(401)


@attempt(WATCH, "a wrong token")
def _(ground: Ground) -> str:
    return say(ground.watch, request("GET", "/api/runs", Authorization=f"{BEARER}x")).refusal(401)


@attempt(WATCH, "a wrong token as a cookie")
def _(ground: Ground) -> str:
    cookie = f"shardwise_watch_{ground.watch}={TOKEN[:-1]}"
    return say(ground.watch, request("GET", "/", Cookie=cookie)).refusal(401)


@attempt(WATCH, "another site's name for this machine (DNS rebinding)")
def _(ground: Ground) -> str:
    return say(ground.watch, request("GET", "/api/runs", "evil.example", Authorization=BEARER)).refusal(403)


def _outside(ground: Ground, path: str) -> str:
    answer = say(ground.watch, request("GET", path, Authorization=BEARER))
    if SECRET in answer.body or "root:" in answer.body or "import " in answer.body:
        raise GotThrough(answer.body)
    return answer.refusal(400, 404)


@attempt(WATCH, "/static/../../command.py")
def _(ground: Ground) -> str:
    return _outside(ground, "/static/../../command.py")


@attempt(WATCH, "/static/%2e%2e/%2e%2e/command.py")
def _(ground: Ground) -> str:
    return _outside(ground, "/static/%2e%2e/%2e%2e/command.py")


@attempt(WATCH, "/static/..%5c..%5ccommand.py (backslashes)")
def _(ground: Ground) -> str:
    return _outside(ground, "/static/..%5c..%5ccommand.py")


@attempt(WATCH, "/static//etc/passwd")
def _(ground: Ground) -> str:
    return _outside(ground, "/static//etc/passwd")


@attempt(WATCH, "/static/watch.js%00.html (a NUL)")
def _(ground: Ground) -> str:
    return _outside(ground, "/static/watch.js%00.html")


@attempt(WATCH, "/api/runs/..%2f..%2fsecret.txt")
def _(ground: Ground) -> str:
    return _outside(ground, "/api/runs/..%2f..%2fsecret.txt")


def _api(ground: Ground, path: str) -> Reply:
    return say(ground.watch, request("GET", path, Authorization=BEARER))


def _scripted(ground: Ground) -> str:
    runs = json.loads(_api(ground, "/api/runs").body)
    return str(next(run["id"] for run in runs if "alert" in run["name"]))


@attempt(WATCH, "a rank's log that is a link to a file elsewhere")
def _(ground: Ground) -> str:
    answer = _api(ground, f"/api/runs/{_scripted(ground)}/log/1")
    if SECRET in answer.body:
        raise GotThrough(answer.body)
    return f"{answer.status}, and nothing of the file: {answer.body}"


@attempt(WATCH, "a script as a run's name and sample, asked for as a page")
def _(ground: Ground) -> str:
    for path in ("/api/runs", f"/api/runs/{_scripted(ground)}/samples", f"/api/runs/{_scripted(ground)}/log/0"):
        answer = _api(ground, path)
        kind, policy = answer.headers["content-type"], answer.headers["content-security-policy"]
        if kind != JSON or "script-src 'self'" not in policy or answer.headers["x-content-type-options"] != "nosniff":
            raise GotThrough(f"{path} is {kind}, {policy}")
        assert "alert(1)" in answer.body and EVIL.encode()
    return f"{JSON}, nosniff, {policy.partition(';')[0]}, script-src 'self'"


@attempt(WATCH, "a request that would change something (POST)")
def _(ground: Ground) -> str:
    return say(ground.watch, request("POST", "/api/runs", Authorization=BEARER)).refusal(405)


@attempt(WATCH, "a body of 1 GB")
def _(ground: Ground) -> str:
    return say(ground.watch, request("GET", "/", Authorization=BEARER, Content_Length=str(1 << 30))).refusal(413)


@attempt(WATCH, "an address of 5,000 characters")
def _(ground: Ground) -> str:
    return say(ground.watch, request("GET", f"/?x={'y' * 5000}", Authorization=BEARER)).refusal(414)


@attempt(WATCH, "a header of 60 KB")
def _(ground: Ground) -> str:
    return say(ground.watch, request("GET", "/", X=("y" * 60_000))).refusal(400, 431)


def _trickle(port: int) -> str:
    from shardwise.serve import request_timeout

    with patched(request_timeout, "HEAD_SECONDS", 0.3):
        answer = say(port, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000, pause=0.05, within=3.0)
    return f"{answer.refusal(0)} after the 0.3 s allowed here (10 as installed)"


@attempt(WATCH, "a request that comes byte by byte and never ends")
def _(ground: Ground) -> str:
    return _trickle(ground.watch)


# The model server


def _ask(port: int, body: bytes, **headers: str) -> Reply:
    return say(port, request("POST", "/v1/chat/completions", body=body, **({"Content_Type": JSON} | headers)))


@attempt(SERVE, "the network without a key (--host 0.0.0.0)")
def _(ground: Ground) -> str:
    return ground.command("serve", str(ground.model), "--host", "0.0.0.0")


@attempt(SERVE, "no key")
def _(ground: Ground) -> str:
    return _ask(ground.serve_with_key, b"{}").refusal(401)


@attempt(SERVE, "a wrong key")
def _(ground: Ground) -> str:
    return _ask(ground.serve_with_key, b"{}", Authorization=f"{BEARER}x").refusal(401)


@attempt(SERVE, "another site's name for this machine (DNS rebinding)")
def _(ground: Ground) -> str:
    return say(ground.serve, request("GET", "/v1/models", "evil.example:8000")).refusal(403)


@attempt(SERVE, "another site's form (text/plain from a browser)")
def _(ground: Ground) -> str:
    headers = {"Content_Type": "text/plain", "Origin": "http://evil.example"}
    return _ask(ground.serve, b'{"model": "x", "messages": []}', **headers).refusal(400)


@attempt(SERVE, "a body of 5 MB")
def _(ground: Ground) -> str:
    return _ask(ground.serve, b'{"model": "' + b"x" * (5 << 20) + b'"}').refusal(413)


@attempt(SERVE, "200,000 brackets")
def _(ground: Ground) -> str:
    return _ask(ground.serve, b"[" * 200_000).refusal(400)


@attempt(SERVE, "a temperature of NaN")
def _(ground: Ground) -> str:
    return _ask(ground.serve, b'{"model": "x", "messages": [], "temperature": NaN}').refusal(400)


@attempt(SERVE, "a model called ../../secret.txt")
def _(ground: Ground) -> str:
    return say(ground.serve, request("GET", "/v1/models/..%2f..%2fsecret.txt")).refusal(404)


@attempt(SERVE, "a model called like a script")
def _(ground: Ground) -> str:
    answer = say(ground.serve, request("GET", "/v1/models/%3Cscript%3Ealert(1)%3C%2fscript%3E"))
    if answer.headers["content-type"] != JSON:
        raise GotThrough(str(answer.headers))
    return answer.refusal(404)


@attempt(SERVE, "a header of 60 KB")
def _(ground: Ground) -> str:
    return say(ground.serve, request("GET", "/v1/models", X=("y" * 60_000))).refusal(400, 431)


@attempt(SERVE, "a request that comes byte by byte and never ends")
def _(ground: Ground) -> str:
    return _trickle(ground.serve)


# Workers that train apart


def _worker(ground: Ground, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
    told = {"Authorization": BEARER, "X_Shardwise_Worker": "me"} | headers
    return say(ground.apart, request(method, path, body=body, **told))


@attempt(APART, "the network without a token (diloco-server --host 0.0.0.0)")
def _(ground: Ground) -> str:
    return ground.command("diloco-server", "--host", "0.0.0.0", "--state", str(ground.folder / "state"))


@attempt(APART, "no token")
def _(ground: Ground) -> str:
    return _worker(ground, "GET", "/status", Authorization="").refusal(401)


@attempt(APART, "a wrong token")
def _(ground: Ground) -> str:
    return _worker(ground, "GET", "/status", Authorization=f"{BEARER}x").refusal(401)


@attempt(APART, "a page in a browser, which cannot name a worker")
def _(ground: Ground) -> str:
    return say(ground.apart, request("GET", "/status", Authorization=BEARER)).refusal(400)


@attempt(APART, "/../../etc/passwd")
def _(ground: Ground) -> str:
    return _worker(ground, "GET", "/../../etc/passwd").refusal(404)


@attempt(APART, "/round/0/..%2f..%2fsecret.txt/0")
def _(ground: Ground) -> str:
    return _worker(ground, "GET", "/round/0/..%2f..%2fsecret.txt/0").refusal(400)


@attempt(APART, "a difference of 1 TB")
def _(ground: Ground) -> str:
    return _worker(ground, "PUT", "/give/0", Content_Length=str(1 << 40)).refusal(413)


@attempt(APART, "a pickle instead of tensors")
def _(ground: Ground) -> str:
    import pickle

    from security.ground import Bomb

    return _worker(ground, "POST", "/join", pickle.dumps(Bomb(ground.mark))).refusal(400)


@attempt(APART, "200,000 brackets")
def _(ground: Ground) -> str:
    return _worker(ground, "POST", "/join", b"[" * 200_000).refusal(400)


@attempt(APART, "a request that comes byte by byte and never ends")
def _(ground: Ground) -> str:
    from shardwise.diloco import server

    with patched(server, "STRANGER", 0.3):
        answer = say(ground.apart, b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 1000, pause=0.05, within=3.0)
    return f"{answer.refusal(0)} after the 0.3 s allowed here (15 as installed)"
