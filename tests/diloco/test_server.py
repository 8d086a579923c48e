"""The meeting point as a process: who may come in, what may be said, and mistakes on its command line."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli
from support.meeting import Point, meeting_point

from shardwise.core.errors import RunFailed, UserError
from shardwise.diloco import client as client_module
from shardwise.diloco.client import Client
from shardwise.diloco.codec import PART, VectorPlan, encode
from shardwise.diloco.server import WORKER

PLAN = VectorPlan((("a", (4,)),))


def ask(point: Point, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", point.port, timeout=30)
    connection.putrequest(method, path)
    for name, value in ({"Content-Length": str(len(body))} if body is not None else {}).items():
        connection.putheader(name, value)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_what_is_refused(tmp_path: Path) -> None:
    me = {WORKER.replace("-", "_"): "me", "Authorization": "Bearer secret"}
    with meeting_point(tmp_path, "--token-env", "MEET_TOKEN", env={"MEET_TOKEN": "secret"}) as point:
        assert ask(point, "GET", "/status", **me)[0] == 200
        for wrong in ("", "Bearer", "Bearer secre", "Bearer secrets"):
            assert ask(point, "GET", "/status", **(me | {"Authorization": wrong}))[0] == 401
        assert ask(point, "GET", "/status", Authorization="Bearer secret")[0] == 400  # nobody
        assert ask(point, "GET", "/status", **(me | {WORKER.replace("-", "_"): "a%0ab"}))[0] == 400
        assert ask(point, "GET", "/../../etc/passwd", **me)[0] == 404
        assert ask(point, "GET", "/round/0/state/0", **me)[0] == 400
        assert ask(point, "GET", "/round/0/global/0", **me)[0] == 410
        assert ask(point, "POST", "/join", b"[]", **me)[0] == 400
        assert ask(point, "POST", "/join", b"{}", **me)[0] == 400
        assert ask(point, "POST", "/join", b"\xff{", **me)[0] == 400
        assert ask(point, "PUT", "/difference/0", b"", **me)[0] == 409  # nobody has given the parameters yet
        assert ask(point, "PUT", "/give/0", **me)[0] == 411
        assert ask(point, "PUT", "/give/0", **me, Content_Length=str(5 * PART))[0] == 413
        assert ask(point, "GET", "/status", **me)[1]["round"] == 0  # and it is there all the same
        with pytest.raises(UserError, match=r"diloco\.token_env.*missing or wrong"):
            Client("127.0.0.1", point.port, "w", "other", 5).join(PLAN, {}, "")
        code, said = point.stop()
        assert code == 0 and "secret" not in said


def test_a_worker_is_told_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "00000"
    with meeting_point(tmp_path / "meet", "--wait", "1s") as point:
        one = Client("127.0.0.1", point.port, "one", None, 5)
        assert one.join(PLAN, {"tokenizer": "t"}, "")["state"] == "give"
        file.write_bytes(encode(torch.ones(4), "fp32"))
        assert one.give(PLAN, {"tokenizer": "t"}, tmp_path / "files")
        assert one.join(PLAN, {"tokenizer": "t"}, "")["state"] == "go"
        two = Client("127.0.0.1", point.port, "two", None, 5)
        with pytest.raises(UserError, match="another tokenizer"):
            two.join(PLAN, {"tokenizer": "u"}, "")
        with pytest.raises(UserError, match=r"has a of shape \[5\]"):
            two.join(VectorPlan((("a", (5,)),)), {"tokenizer": "t"}, "")
        file.write_bytes(encode(torch.tensor([1.0, float("nan"), 0.0, 0.0]), "fp32"))
        word = {"round": 0, "tokens": 1, "step": 1, "last": False}
        with pytest.raises(RunFailed, match="no numbers; it was not averaged"):
            one.exchange(PLAN, tmp_path / "files", word, tmp_path / "in", False, lambda: False)
        file.write_bytes(encode(torch.ones(3), "fp32"))
        with pytest.raises(RunFailed, match="refused what this worker sent"):
            one.exchange(PLAN, tmp_path / "files", word, tmp_path / "in", False, lambda: False)
        file.write_bytes(encode(torch.ones(4), "fp32"))
        with pytest.raises(RunFailed, match="knows nothing of round 7"):
            one.exchange(PLAN, tmp_path / "files", word | {"round": 7}, tmp_path / "in", False, lambda: False)
        ended = one.exchange(PLAN, tmp_path / "files", word, tmp_path / "in", False, lambda: False)
        assert ended is not None and (ended.round, ended.kind, ended.late) == (1, "global", False)
        assert one.bytes_sent > 500 and one.bytes_received > 300
    with pytest.raises(RunFailed, match=r"could not be reached for 0\.2 s"):
        Client("127.0.0.1", point.port, "one", None, 0.2).join(PLAN, {}, "")


def test_a_worker_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there, or diloco.server is misspelt: it says so after some seconds, not only at the end."""
    now, told = [0.0], list[str]()
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(client_module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(RunFailed, match="could not be reached for 60 s"):
        Client("nod-1.invalid", 29400, "one", None, 60.0, told.append).join(PLAN, {}, "")
    assert len(told) == 3 and "diloco.server: nobody answers at nod-1.invalid:29400 (" in told[0]
    assert "giving up after 1min (advanced.diloco.connect_timeout)" in told[0]


@pytest.mark.parametrize("words, said", [
    (("--host", "0.0.0.0"), "--token-env"),
    (("--token-env", "NOT_SET_ANYWHERE"), "holds no key"),
    (("--method", "adam"), "diloco, fedavg"),
    (("--dtype", "fp64"), "fp32, bf16, int8, int4"),
    (("--outer-optimizer", "adam"), "nesterov, sgd"),
    (("--weight", "size"), "equal, tokens"),
    (("--outer-lr", "0"), "above 0"),
    (("--outer-momentum", "1"), "below 1"),
    (("--wait", "soon"), "60s"),
    (("--open",), "--open: is for listening elsewhere than here without a token, and --host 127.0.0.1 is here"),
    (("--method", "fedavg", "--outer-optimizer", "nesterov"), "is the same as sgd without momentum"),
    (("--state", "/dev/null/x"), "--state"),
])  # fmt: skip
def test_mistakes(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.main import main

    with pytest.raises(SystemExit) as left:
        main(["diloco-server", "--port", "0", *words])
    told = capsys.readouterr().err
    assert left.value.code == 2 and said in told and "Traceback" not in told


def test_help_has_examples() -> None:
    code, out, _ = cli.command("diloco-server", "--help")
    assert code == 0 and "Examples" in out and "--method fedavg" in out


def test_a_folder_is_one_meeting_point_s(tmp_path: Path) -> None:
    """Two in one folder would write over each other's rounds."""
    from shardwise.core.errors import UserError
    from shardwise.diloco.command import _only_one

    held = _only_one(tmp_path / "meet")
    with pytest.raises(UserError, match="another sync server is using this folder"):
        _only_one(tmp_path / "meet")
    held.release()
    _only_one(tmp_path / "meet").release()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        _only_one(tmp_path / "file")
