"""The token of the hosts' meeting: where it comes from, what it costs whoever lacks it, and that it works."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support import cli
from support.hosts import Agent
from support.tiny import tiny_run

from shardwise.core.errors import UserError
from shardwise.launch.rendezvous import HostReport, Rendezvous, Rules
from shardwise.launch.rendezvous_link import Keeper, Line, RendezvousAddress, free_port
from shardwise.launch.token import VARIABLE, make_token, proof, take_token

TOKEN = "0123456789abcdef-0123"
ME = HostReport("a-1", "a", 1, 4242, "waiting")


def test_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert take_token(None) is None
    monkeypatch.setenv(VARIABLE, f" {TOKEN}\n")
    assert take_token(None) == TOKEN and VARIABLE not in os.environ, "ranks do not inherit it"
    file = tmp_path / "token"
    file.write_text(TOKEN + "x\n")
    file.chmod(0o600)
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert take_token(file) == TOKEN + "x" and VARIABLE not in os.environ
    for wrong, told in ((tmp_path / "none", "cannot be read"), (tmp_path, "token-file")):
        with pytest.raises(UserError, match=told):
            take_token(wrong)
    assert len(make_token()) == 64 and make_token() != make_token()


def test_a_proof_is_of_the_words_the_numbers_and_the_side() -> None:
    shown = proof(TOKEN, "host", ("1", "2"), b"words")
    assert len(shown) == 64 and proof(None, "host", ("1", "2"), b"words") == ""
    others = [proof(TOKEN, "keeper", ("1", "2"), b"words"), proof(TOKEN, "host", ("2", "1"), b"words"),
              proof(TOKEN, "host", ("1", "2"), b"word"), proof(TOKEN + "x", "host", ("1", "2"), b"words")]  # fmt: skip
    assert shown not in others and len(set(others)) == 4


def test_those_who_share_it_meet_and_others_are_told() -> None:
    place = RendezvousAddress("127.0.0.1", free_port(), "ours", TOKEN)
    assert TOKEN not in repr(place)
    keeper = Keeper(place, Rendezvous(Rules(2, 2), "a-1"))
    try:
        answer = Line(place).ask(ME)
        assert answer is not None and answer.order == "wait"
        for token in (None, TOKEN + "x"):
            with pytest.raises(UserError, match="token is missing or not the others'"):
                Line(replace(place, token=token)).ask(ME)
        with pytest.raises(UserError, match="another run meets there"):
            Line(replace(place, run="theirs")).ask(ME)
    finally:
        keeper.close()
    open_to_all = Keeper(replace(place, token=None), Rendezvous(Rules(2, 2), "a-1"))
    try:
        with pytest.raises(UserError, match="the others have no token"):
            Line(place).ask(ME)
    finally:
        open_to_all.close()


def test_a_stranger_who_takes_the_place_later_is_not_listened_to() -> None:
    place = RendezvousAddress("127.0.0.1", free_port(), "ours", TOKEN)
    keeper, line = Keeper(place, Rendezvous(Rules(2, 2), "a-1")), Line(place)
    assert line.ask(ME) is not None
    keeper.close()
    with socket.create_server((place.host, place.port)) as stranger:

        def refuse() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b'{"number": "1"}\n')
                connection.recv(65536)
                connection.sendall(b'{"refused": "go away"}\n')

        threading.Thread(target=refuse, daemon=True).start()
        assert line.ask(ME) is None, "as if nobody were there: the run is not ended by it"


def test_on_loopback_nobody_else_can_reach_it() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        place = RendezvousAddress(host, free_port(), "ours")
        try:
            keeper = Keeper(place, Rendezvous(Rules(2, 2), "a-1"))
        except OSError:
            continue  # no IPv6 here
        try:
            assert keeper._server.server_address[0] in ("127.0.0.1", "::1") and Line(place).ask(ME) is not None
        finally:
            keeper.close()


def test_without_one_the_keeper_warns(tmp_path: Path) -> None:
    file = cli.write_run(tmp_path / "run", tiny_run(tmp_path))
    words = ("--hosts", "2", "--rendezvous", f"{socket.gethostname()}:{free_port()}", "--ranks", "1", "--wait", "2")
    agent = Agent(file, *words)
    assert agent.finish(60) == 1 and "WARNING: no token" in agent.text and VARIABLE in agent.text
