"""Pushing to a hub, against a mock on loopback that speaks its API; and what users are told where it cannot work."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import cli


class Hub(ThreadingHTTPServer):
    """Remembers what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuse = 0


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def _answer(self, body: Any, code: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer hf_good":
            self._answer({"error": "Invalid credentials"}, 401)
        else:
            user = {"type": "user", "name": "owner", "auth": {}}
            self._answer(user if "whoami" in self.path else {"id": "owner/name", "sha": "1", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuse:
            self._answer({"error": "You may not write there"}, self.server.refuse)
        elif "repos/create" in self.path:
            self.server.repos.append(json.loads(body))
            self._answer({"url": f"http://127.0.0.1:{self.server.server_address[1]}/owner/name", "name": "owner/name"})
        elif "preupload" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in filter(None, body.split(b"\n")):
                if (entry := json.loads(line))["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._answer(
                {
                    "commitUrl": f"http://127.0.0.1:{self.server.server_address[1]}/owner/name/commit/1",
                    "commitOid": "1",
                    "success": True,
                }
            )
        else:
            self._answer({})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_is_pushed_whole(output: Path, tmp_path: Path, hub: Hub) -> None:
    target = tmp_path / "model"
    code, out, err = cli.fresh_command("export", output, target, "--push", "owner/name", "--private")
    assert code == 0 and "pushed to http://127.0.0.1" in out, err
    asked = hub.repos[0]
    assert asked["name"] == "name" and (asked.get("visibility") == "private" or asked.get("private"))
    wanted = {p.name: p.read_bytes() for p in target.iterdir() if p.name != "shardwise_run.json"}
    assert hub.files == wanted and "README.md" in wanted, "all but the config with its paths"


def test_a_file_is_pushed_with_its_card(output: Path, tmp_path: Path, hub: Hub) -> None:
    code, _, err = cli.fresh_command("export", output, tmp_path / "m.gguf", "--gguf", "q8_0", "--push", "owner/name")
    assert code == 0, err
    assert hub.files["m.gguf"] == (tmp_path / "m.gguf").read_bytes()
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: gguf")


@pytest.mark.parametrize("case", ["no login", "wrong token", "offline", "no connection", "not allowed"])
def test_what_users_are_told(
    output: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """All but the last is found before anything is exported."""
    words = "403 Forbidden"
    if case == "no login":
        monkeypatch.delenv("HF_TOKEN")
        words = "you are not logged in"
    elif case == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_bad")
        words = "the token was not accepted"
    elif case == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        words = "HF_HUB_OFFLINE is set"
    elif case == "no connection":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        words = "the hub cannot be reached"
    else:
        hub.refuse = 403
    target = tmp_path / "model"
    code, out, err = cli.fresh_command("export", output, target, "--push", "owner/name", "--no-check")
    assert code == 2 and words in err and "--push = 'owner/name'" in err and "Traceback" not in out + err
    assert target.exists() == (case == "not allowed") and not hub.files
    assert "hf_good" not in out + err and "hf_bad" not in out + err
