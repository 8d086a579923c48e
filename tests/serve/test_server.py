"""A real server process, asked by the official client, by malformed requests and by clients that leave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import torch
from support.answering import wait_until
from support.server import Server, serving
from support.tiny import LLAMA, saved_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.nn.generate import Message, Sampling, reply

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
KEY = "sesame"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose answers to different prompts differ, and hardly ever end by themselves."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    saved_model(place, LLAMA)
    model = AutoModelForCausalLM.from_pretrained(place)
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def local(folder: Path) -> tuple[Any, Any]:
    """The same model in this process."""
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), f"again={folder}", "--max-tokens", "400", "--queue", "64") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Server]:
    """With a key, a low rate and a short time limit."""
    words = ("--api-key-env", "MY_KEY", "--rate", "3/h", "--name", "secret", "--host", "0.0.0.0")
    with serving(str(folder), *words, MY_KEY=KEY) as running:
        yield running


def ask(text: str) -> list[Message]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def post(server: Server, body: Any, path: str = "/chat/completions", **options: Any) -> Any:
    """A request without the client's help."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json"} | options.pop("headers", {})
    return httpx.post(server.url + path, headers=headers, timeout=200, **given, **options)


def streamed(client: Any, text: str, **options: Any) -> tuple[str, list[Any]]:
    """The joined text of a stream, and its chunks."""
    chunks = list(client.chat.completions.create(model="tiny", messages=ask(text), stream=True, **options))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def test_a_whole_answer(server: Server, local: tuple[Any, Any]) -> None:
    expected = reply(*local, ask("What is a shard?"), Sampling(max_tokens=24))
    given = server.client().chat.completions.create(
        model="tiny", messages=ask("What is a shard?"), max_tokens=24, temperature=0
    )
    choice = given.choices[0]
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == {"stop": "stop", "length": "length"}[expected.ended]
    usage = given.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.tokens)
    assert usage.total_tokens == expected.prompt_tokens + expected.tokens and given.model == "tiny"


def test_a_stream(server: Server, local: tuple[Any, Any]) -> None:
    expected = reply(*local, ask("Hi"), Sampling(max_tokens=24))
    text, chunks = streamed(server.client(), "Hi", max_completion_tokens=24, temperature=0)
    assert text == expected.text and len(chunks) > 10
    assert chunks[0].choices[0].delta.role == "assistant" and all(c.usage is None for c in chunks)
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"]
    assert len({c.id for c in chunks}) == 1
    text, chunks = streamed(server.client(), "Hi", max_tokens=5, temperature=0, stream_options={"include_usage": True})
    assert chunks[-1].usage.completion_tokens == 5 and not chunks[-1].choices


def test_fifty_streams_at_once_and_none_mixed_up(server: Server, local: tuple[Any, Any]) -> None:
    texts = [f"Question {i}: {'why ' * (i % 7)}{i * i}?" for i in range(50)]
    sizes = [10 + i % 13 for i in range(50)]
    expected = [reply(*local, ask(t), Sampling(max_tokens=n)).text for t, n in zip(texts, sizes, strict=True)]
    assert len(set(expected)) == 50
    client = server.client()
    with ThreadPoolExecutor(50) as pool:
        jobs = [
            pool.submit(streamed, client, t, max_tokens=n, temperature=0) for t, n in zip(texts, sizes, strict=True)
        ]
        assert [job.result()[0] for job in jobs] == expected
    assert httpx.get(server.url.replace("/v1", "/health")).json() == {"status": "ok", "running": 0, "waiting": 0}


def test_choices_seeds_and_stops(server: Server, local: tuple[Any, Any]) -> None:
    client = server.client()

    def draw(**options: Any) -> list[str]:
        given = client.chat.completions.create(model="tiny", messages=ask("Hi"), max_tokens=16, **options)
        assert [choice.index for choice in given.choices] == list(range(len(given.choices)))
        return [choice.message.content for choice in given.choices]

    three = draw(n=3, seed=7, temperature=1.2, top_p=0.9)
    alone = [reply(*local, ask("Hi"), Sampling(16, 1.2, 0.9, 7 + i)).text for i in range(3)]
    assert three == alone and len(set(three)) == 3
    assert draw(n=1)[0] != draw(n=1)[0], "without a seed, and at the default temperature, answers differ"
    (whole,) = draw(temperature=0)
    stop = whole[3:5]
    assert draw(temperature=0, stop=[stop, "never there"]) == [whole[: whole.index(stop)]]


def test_log_probabilities(server: Server) -> None:
    given = server.client().chat.completions.create(
        model="tiny", messages=ask("Hi"), max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    rows = given.choices[0].logprobs.content
    assert len(rows) == 6 and all(len(row.top_logprobs) == 2 and row.logprob <= 0 for row in rows)
    assert all(row.top_logprobs[0].token == row.token for row in rows), "the likeliest is taken"
    assert all(row.bytes is None or bytes(row.bytes).decode() == row.token for row in rows)


def test_completions(server: Server, local: tuple[Any, Any]) -> None:
    model, tokenizer = local
    client = server.client()
    ids = tokenizer("Sharding is")["input_ids"]
    row = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(row[0, len(ids) :], skip_special_tokens=True)
    for prompt in ("Sharding is", ids):
        given = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0, logprobs=1)
        assert given.choices[0].text == expected and given.object == "text_completion"
        assert len(given.choices[0].logprobs.tokens) == 8
    several = client.completions.create(model="again", prompt=["Sharding is", "b", "c"], max_tokens=8, temperature=0)
    assert [c.index for c in several.choices] == [0, 1, 2] and several.choices[0].text == expected
    chunks = client.completions.create(model="tiny", prompt="Sharding is", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_models(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", "again"]
    assert client.models.retrieve("again").id == "again"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../etc/passwd")


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"messages": "Hi"}, 400, "messages", "list"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "system"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content", "valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages.0.content.0.type",
            "text",
        ),
        ({"messages": HI * 400}, 400, "prompt", "context of 512 tokens"),
        ({"messages": HI, "max_tokens": 401}, 400, "max_tokens", "at most 400"),
        ({"messages": [{"role": "user", "content": "why " * 60}], "max_tokens": 400}, 400, "max_tokens", "context"),
        ({"messages": HI, "max_tokens": 0}, 400, "max_tokens", "greater than"),
        ({"messages": HI, "max_tokens": "5"}, 400, "max_tokens", "integer"),
        ({"messages": HI, "temperature": -1}, 400, "temperature", "greater than"),
        ({"messages": HI, "top_p": 2}, 400, "top_p", "less than"),
        ({"messages": HI, "n": 100_000}, 400, "n", "less than"),
        ({"messages": HI, "stop": ""}, 400, "stop", "at least 1"),
        ({"messages": HI, "frequency_penalty": 1.0}, 400, "frequency_penalty", "0"),
        ({"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format.type", "text"),
        ({"messages": HI, "tool_choice": "required"}, 400, "tool_choice", "auto"),
        ({"messages": HI, "tools": [{"type": "function"}]}, 400, "tools", "takes none"),
        ({"messages": HI, "temprature": 1}, 400, "temprature", "unknown field"),
        ({"messages": HI, "model": "gpt-4"}, 404, "model", "there is tiny, again"),
        ({"messages": HI, "model": None}, 400, "model", "valid string"),
    ],
)
def test_mistakes_are_named(server: Server, change: dict[str, Any], status: int, param: str | None, words: str) -> None:
    given = post(server, {"model": "tiny"} | change)
    error = given.json()["error"]
    assert given.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and words in error["message"]
    assert param is None or error["param"] == param


def test_the_client_raises_its_own_errors(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="unknown field"):
        client.chat.completions.create(model="tiny", messages=HI, extra_body={"nonsense": 1})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HI)


def test_bodies_that_are_no_request(server: Server) -> None:
    for body in (b"", b"{", b"[]", b'"Hi"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000):
        given = post(server, body)
        assert given.status_code == 400 and given.json()["error"]["message"], body[:20]
    assert post(server, b"{}", headers={"Content-Type": "text/plain"}).status_code == 400
    assert post(server, b"x" * (5 << 20)).status_code == 413
    assert post(server, {"model": "tiny", "prompt": [5, 10**9]}, "/completions").status_code == 400
    assert post(server, {"model": "tiny", "prompt": []}, "/completions").status_code == 400
    assert post(server, {"model": "tiny", "prompt": ["a"] * 30, "n": 3}, "/completions").status_code == 400
    half = (
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "\\ud800": 1}',
        b'{"model": "\\ud800", "prompt": "x"}',
    )
    for body in half:
        assert post(server, body, "/completions").status_code in (400, 404), body
    for path, status in (("/nothing", 404), ("/../../etc/passwd", 404), ("/models", 405)):
        given = post(server, {}, path)
        assert given.status_code == status and given.json()["error"]["message"]
    assert post(server, {"model": "tiny", "messages": HI}, headers={"Host": "evil.example"}).status_code == 403


def test_a_body_that_never_ends_is_cut_off(server: Server) -> None:
    """Without a Content-Length: counted while it comes in."""

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield b" " * 65536

    try:
        given = httpx.post(
            server.url + "/completions", content=endless(), headers={"Content-Type": "application/json"}, timeout=60
        )
        assert given.status_code == 413
    except httpx.TransportError:
        pass  # the connection was closed while we were still sending, which is as good
    assert httpx.get(server.url.replace("/v1", "/health")).json()["status"] == "ok"


def busy(server: Server) -> tuple[int, int]:
    health = httpx.get(server.url.replace("/v1", "/health"), timeout=60).json()
    return health["running"], health["waiting"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_let_go(server: Server, stream: bool) -> None:
    """It reads nothing, then drops the connection: its rows do not go on."""
    place = urlparse(server.url)
    body = json.dumps({"model": "tiny", "messages": HI, "max_tokens": 400, "n": 64, "stream": stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    logged = len(server.logged)
    with socket.create_connection((str(place.hostname), place.port or 0)) as line:
        line.sendall(head.encode() + body)
        wait_until(lambda: busy(server)[0] > 0)
    wait_until(lambda: busy(server) == (0, 0))
    wait_until(lambda: len(server.logged) > logged)
    assert any("client left" in line for line in server.logged[logged:])


def test_a_full_queue(server: Server) -> None:
    def flood() -> int:
        return int(post(server, {"model": "tiny", "messages": HI, "max_tokens": 300, "n": 64}).status_code)

    with ThreadPoolExecutor(4) as pool:
        codes = [job.result() for job in [pool.submit(flood) for _ in range(4)]]
    assert 503 in codes and 200 in codes and set(codes) == {200, 503}


def test_prompts_are_not_logged(server: Server) -> None:
    server.client().chat.completions.create(model="tiny", messages=ask("xyzzy-plugh"), max_tokens=2)
    wait_until(lambda: any("2 new" in line for line in server.logged))
    assert not any("xyzzy" in line for line in server.logged)


def test_key_and_rate(guarded: Server) -> None:
    wait_until(lambda: any("$MY_KEY" in line for line in guarded.said))
    assert KEY not in "".join(guarded.said)
    assert httpx.get(guarded.url.replace("/v1", "/health")).status_code == 200, "health is for everyone"
    for key in ("wrong", KEY + "x", "é"):
        given = post(guarded, {"model": "secret", "messages": HI}, headers={"Authorization": f"Bearer {key}".encode()})
        assert given.status_code == 401 and given.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="wrong").models.list()
    client = guarded.client(api_key=KEY)
    assert [model.id for model in client.models.list()] == ["secret"]
    for _ in range(3):
        client.chat.completions.create(model="secret", messages=HI, max_tokens=2)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="secret", messages=HI, max_tokens=2)
    assert int(caught.value.response.headers["retry-after"]) > 60


def test_sigterm_ends_streams_and_leaves_with_0(folder: Path) -> None:
    with serving(str(folder)) as server:
        client = server.client()
        done = client.chat.completions.create(model="tiny", messages=HI, max_tokens=1)
        assert done.usage.completion_tokens == 1
        stream = client.chat.completions.create(model="tiny", messages=HI, max_tokens=200, temperature=0, stream=True)
        next(stream)
        server.process.terminate()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert len(text) > 100, "what is under way may finish within the grace"
        assert server.process.wait(180) == 0, "it ends by itself"
        assert not any("Traceback" in line for line in server.logged)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_streams_of_a_real_model() -> None:
    from shardwise.export.inference import load_for_inference

    name = "smollm2-135m-instruct"
    model, tokenizer = load_for_inference(name)
    texts = [f"What is {i} plus {i}?" if i % 2 else f"Write a sentence about the number {i}." for i in range(50)]
    talks: list[list[Message]] = [[{"role": "user", "content": text}] for text in texts]
    expected = [reply(model, tokenizer, talk, Sampling(max_tokens=12)).text for talk in talks]
    assert len(set(expected)) > 25
    with serving(name) as server:
        client = server.client(timeout=600)

        def streamed(talk: list[Message]) -> str:
            chunks = client.chat.completions.create(
                model=name, messages=talk, max_tokens=12, temperature=0, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        with ThreadPoolExecutor(50) as pool:
            assert list(pool.map(streamed, talks)) == expected
        assert server.stop() == 0
