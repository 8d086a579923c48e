"""Who may look, and that nothing but what was asked for ever leaves: tokens, hosts, paths, sizes, scripts in names."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.watched import make_run, write_lines

from shardwise.cli import main as cli
from shardwise.core.errors import UserError
from shardwise.watch.app import AccessControl, Pages
from shardwise.watch.command import WatchOptions, address, beside, find_token, listen, watch
from shardwise.watch.files import STATIC, page_file
from shardwise.watch.finder import Finder

EVIL = "<script>alert(1)</script>"
TOKEN = "a-token-of-16-characters-or-more"


def client(root: Path, door: AccessControl | None = None, base: str = "http://127.0.0.1") -> TestClient:
    return TestClient(Pages(Finder([root]), door or AccessControl()).app(), base_url=base, follow_redirects=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs/one")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


def test_the_page_and_its_answers(root: Path) -> None:
    web = client(root)
    (run,) = web.get("/api/runs").json()
    assert run["name"] == "one" and run["step"] == 20 and run["state"]["word"] == "running"
    place = f"/api/runs/{run['id']}"
    assert web.get(place).json()["ranks"][1]["doing"] == "computing"
    told = web.get(f"{place}/series?generation=0&after_train=18&after_eval=20").json()
    assert told["kinds"]["train"]["loss"][0] == [19, 20] and not told["kinds"]["eval"]
    assert web.get(f"{place}/series?first=3&last=4").json()["kinds"]["train"]["loss"][0] == [3, 4]
    assert web.get(f"{place}/log/1").json() == ["rank 1 says hello"]
    assert web.get(f"{place}/hosts").json()["0"]["name"] == "here" and web.get(f"{place}/samples").json() == []
    assert web.get(f"/api/compare?runs={run['id']}").json() == []
    page = web.get("/")
    assert page.headers["content-type"].startswith("text/html")
    wanted = re.findall(r'(?:src|href)="/static/([^"]+)"', page.text)
    assert set(wanted) == set(STATIC) and all(web.get(f"/static/{name}").status_code == 200 for name in wanted)


def test_every_answer_has_a_strict_policy(root: Path) -> None:
    web = client(root)
    for path in ("/", "/api/runs", "/static/watch.js", "/nothing", "/api/runs/none"):
        headers = web.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [
    "/static/../app.py", "/static/%2e%2e/app.py", "/static/uplot/../../app.py", "/static//etc/passwd",
    "/static/index.html", "/api/runs/{id}/log/-1",
    "/api/runs/..%2f..%2fsecret.txt", "/api/runs/%2e%2e", "/api/runs/one", "/api/runs/{id}/log/9",
    "/api/runs/{id}/log/0%2f..%2f..%2fjob.json", "/api/compare?runs=../secret.txt",
])  # fmt: skip
def test_nothing_outside_is_served(root: Path, path: str) -> None:
    web = client(root)
    key = web.get("/api/runs").json()[0]["id"]
    answer = web.get(path.replace("{id}", key))
    assert answer.status_code == 404 and "secret" not in answer.text and "import" not in answer.text


def test_only_get_without_a_body_and_of_bounded_size(root: Path) -> None:
    web = client(root)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert web.request(method, "/api/runs").status_code == 405
    assert web.request("GET", "/api/runs", content=b"x" * 100).status_code == 413
    assert web.get("/api/runs?x=" + "y" * 5000).status_code == 414
    place = f"/api/runs/{web.get('/api/runs').json()[0]['id']}/series"
    for asked in ("points=nan", "first=1e999", "points=x", "generation=;"):
        assert web.get(f"{place}?{asked}").status_code == 400, asked
    assert len(web.get(f"{place}?points=99999999").json()["kinds"]["train"]["loss"][0]) == 20


def test_other_names_for_this_machine_are_refused(root: Path) -> None:
    for base, status in (
        ("http://127.0.0.1:8765", 200), ("http://localhost:8765", 200), ("http://[::1]:8765", 200),
        ("http://evil.example:8765", 403), ("http://127.0.0.1.evil.example", 403), ("http://10.0.0.1", 403),
    ):  # fmt: skip
        assert client(root, base=base).get("/api/runs").status_code == status, base


def test_a_token_by_address_cookie_or_header(root: Path) -> None:
    door = AccessControl(TOKEN, local_only=False, cookie="c")
    web = client(root, door, "http://host.example")
    for path in ("/", "/api/runs", "/metrics", "/static/watch.js", "/?token=wrong", f"/api/runs?token={TOKEN}"):
        answer = web.get(path)
        assert answer.status_code == 401 and TOKEN not in answer.text, path
    opened = web.get(f"/?token={TOKEN}&compare=x")
    assert opened.status_code == 303 and opened.headers["location"] == "/?compare=x", "it leaves the address"
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert web.get("/api/runs").status_code == 200, "by cookie"
    bare = client(root, door, "http://host.example")
    assert bare.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert bare.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}é".encode()}).status_code == 401


def test_where_a_token_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token("127.0.0.1", None) is None
    made = find_token("0.0.0.0", None)
    assert made is not None and len(made) >= 32 and made != find_token("0.0.0.0", None)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    assert find_token("127.0.0.1", "MY_TOKEN") == TOKEN
    for bad in ("", "short", "x" * 20 + "&"):
        monkeypatch.setenv("MY_TOKEN", bad)
        with pytest.raises(UserError, match="token"):
            find_token("0.0.0.0", "MY_TOKEN")


def test_what_runs_write_is_never_html(tmp_path: Path) -> None:
    name = EVIL.replace("/", "")
    run = make_run(tmp_path / name)
    (run / "logs/rank-0.log").write_text(EVIL)
    write_lines(run / "samples.jsonl", [{"step": 1, "prompt": EVIL, "text": EVIL}])
    web = client(tmp_path)
    key = web.get("/api/runs").json()[0]["id"]
    for path in ("/api/runs", f"/api/runs/{key}", f"/api/runs/{key}/log/0", f"/api/runs/{key}/samples"):
        assert web.get(path).headers["content-type"] == "application/json"
    script = "".join(page_file(one) for one in ("watch.js", "charts.js", "panels.js"))
    for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert door not in script, door


def test_prometheus(root: Path) -> None:
    run = root / 'with "quotes"'
    make_run(run)
    text = client(root).get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    number = r"-?(\d+\.?\d*([eE][-+]?\d+)?)"
    assert all(re.fullmatch(rf'[a-z_]+\{{([a-z_]+="([^"\\]|\\.)*",?)+\}} {number}', line) for line in lines), text
    assert 'shardwise_run_state{run="one",state="running"} 1.0' in lines
    assert 'shardwise_step{run="with \\"quotes\\""} 20.0' in lines
    assert 'shardwise_source_eval_loss{run="one",source="web"} 2.0' in lines
    assert 'shardwise_rank_step_seconds{run="one",rank="1"} 0.2' in lines
    for name in ("loss", "tokens_per_second", "grad_norm", "memory_bytes", "rank_memory_bytes", "host_cpu_percent"):
        assert f"# TYPE shardwise_{name} gauge" in text and text.count(f"# TYPE shardwise_{name} ") == 1
    assert "nan" not in text.lower()


def test_beside_a_run(tmp_path: Path) -> None:
    said: list[str] = []
    with beside(tmp_path / "later", said.append):
        url = re.search(r"http://\S+", said[0])
        assert url is not None

        def ask(path: str) -> Any:
            with urllib.request.urlopen(url[0] + path, timeout=10) as answer:
                return json.loads(answer.read())

        assert ask("api/runs") == [], "its folder is not there yet"
        with pytest.raises(urllib.error.HTTPError, match="431"):
            urllib.request.urlopen(urllib.request.Request(url[0], headers={"X": "y" * 20_000}), timeout=10)
    with pytest.raises(OSError):
        urllib.request.urlopen(url[0], timeout=2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is no folder"):
        watch(WatchOptions([tmp_path / "none"]))
    with pytest.raises(UserError, match="holds no run"):
        watch(WatchOptions([tmp_path], html=tmp_path / "x.html"))
    with pytest.raises(SystemExit) as left:
        cli.main(["watch", str(tmp_path), "--terminal", "--html", "x"])
    assert left.value.code == 2 and "does not go with --html" in capsys.readouterr().err
    with listen("127.0.0.1", 0) as taken:
        assert address(taken, "t").endswith(f":{taken.getsockname()[1]}/?token=t")
        with pytest.raises(UserError, match="in use"):
            listen("127.0.0.1", taken.getsockname()[1])
    make_run(tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        cli.main(["watch", str(tmp_path), "--terminal"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "run  running" in out and "step 20/100" in out and "evaluation loss" in out
    assert "rank 0 says hello" in out and "\x1b" not in out and math.inf > len(out)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(["watch", "--html", "out/page.html"])
    assert left.value.code == 0 and (tmp_path / "out/page.html").stat().st_size > 100_000
