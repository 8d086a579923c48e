"""A host's agent with real ranks, on this host: start, restart, mistakes, stopping, and what is refused before."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from support import cli
from support.hosts import Agent
from support.tiny import tiny_run

from shardwise.cli import main as command_line
from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.launch import node
from shardwise.launch.group import _reason
from shardwise.launch.hosts import Hosts, check_sizes, names_of, parse_hosts
from shardwise.launch.rendezvous import HostReport, Rendezvous, Rules
from shardwise.launch.rendezvous_link import Keeper, Line, RendezvousAddress, free_port, interface_towards, lead


def agents(file: Path, number: int, *more: str) -> list[Agent]:
    meet = ["--hosts", str(number), "--rendezvous", f"127.0.0.1:{free_port()}", "--ranks", "1", *more]
    return [Agent(file, *meet, "--name", f"host-{n}") for n in range(number)]


def test_numbers_of_hosts() -> None:
    assert parse_hosts("4") == Hosts(4, 4) and parse_hosts("2:4") == Hosts(2, 4)
    assert str(Hosts(2, 4)) == "2:4" and str(Hosts(4, 4)) == "4"
    for wrong in ("", "0", "4:2", "a", "2:", "1:2:3"):
        with pytest.raises(UserError, match="--hosts"):
            parse_hosts(wrong)


def test_names_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode-1 slots=8\n\nuser@node-2  # the second\n")
    assert names_of(str(file)) == ["node-1", "user@node-2"] and names_of("a, b") == ["a", "b"]
    for wrong in ("", "a,,b", "-oProxyCommand=x", "a,a"):
        with pytest.raises(UserError, match="--ssh"):
            names_of(wrong)


def test_every_number_of_hosts_is_checked_before_the_start(tmp_path: Path) -> None:
    run = load_run(tiny_run(tmp_path, train__batch_size=16)).run
    check_sizes(run, Hosts(2, 2), 1)
    with pytest.raises(UserError) as refused:
        check_sizes(run, Hosts(2, 4), 1)
    text = str(refused.value)
    assert "with 3 of 2:4 hosts (3 ranks)" in text and "train.batch_size = 16" in text
    assert "use a multiple of 12, e.g. 12" in text
    with pytest.raises(UserError, match=r"parallel\.dp_shard_size"):
        check_sizes(load_run(tiny_run(tmp_path, parallel__dp_shard_size=4, parallel__zero=3)).run, Hosts(1, 3), 4 // 2)


def test_a_batch_that_fewer_hosts_cannot_divide_is_told_at_once(tmp_path: Path) -> None:
    file = cli.write_run(tmp_path / "run", tiny_run(tmp_path, train__batch_size=16))
    agent = Agent(file, "--hosts", "2:3", "--rendezvous", "127.0.0.1:1", "--ranks", "1")
    assert agent.finish(60) == 2 and "with 3 of 2:3 hosts" in agent.text
    assert not (tmp_path / "out").exists()


def test_places() -> None:
    assert RendezvousAddress.parse("node-1:29400", "x") == RendezvousAddress("node-1", 29400, "x")
    assert RendezvousAddress.parse("[::1]:1", "x").host == "::1"
    for wrong in ("node-1", ":1", "a:b", "a:0", "a:70000"):
        with pytest.raises(UserError, match="--rendezvous"):
            RendezvousAddress.parse(wrong, "x")
    assert RendezvousAddress("127.0.0.1", 1, "x").is_here() and not RendezvousAddress("192.0.2.1", 1, "x").is_here()
    assert not RendezvousAddress("no-such-host.invalid", 1, "x").is_here()
    assert interface_towards("127.0.0.1") in ("lo", "lo0")


def test_the_keeper_answers_ours_and_survives_others() -> None:
    place = RendezvousAddress("127.0.0.1", free_port(), "ours")
    keeper = lead(place, Rendezvous(Rules(1, 1, last_call=0), "a"))
    assert isinstance(keeper, Keeper)
    try:
        assert lead(place, Rendezvous(Rules(1, 1))) is None, "one book is enough"
        for rubbish in (b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b'{"run": "ours", "report": {}}\n', b"\xff\n"):
            with socket.create_connection((place.host, place.port), 5) as stranger:
                stranger.sendall(rubbish)
        with pytest.raises(UserError, match="another run meets there"):
            Line(RendezvousAddress(place.host, place.port, "theirs")).ask(HostReport("b", "b", 1, 1, "waiting"))
        answer = Line(place).ask(HostReport("a", "a", 1, 1, "waiting"))
        assert answer is not None and answer.order == "run" and answer.seats[0].address == "127.0.0.1"
    finally:
        keeper.close()
    assert Line(place).ask(HostReport("a", "a", 1, 1, "waiting")) is None


def test_a_port_that_another_program_has_is_told(tmp_path: Path) -> None:
    file = cli.write_run(tmp_path / "run", tiny_run(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        meet = f"127.0.0.1:{other.getsockname()[1]}"
        agent = Agent(file, "--hosts", "2", "--rendezvous", meet, "--ranks", "1", "--patience", "3")
        assert agent.finish(60) == 2 and "another program listens there" in agent.text


def test_nobody_comes(tmp_path: Path) -> None:
    """They say what they wait for, and in the end why they gave up."""
    file = cli.write_run(tmp_path / "run", tiny_run(tmp_path))
    words = ("--hosts", "2", "--ranks", "1", "--wait", "12s", "--name", "me")  # the first word is due after 5, then 15
    alone = Agent(file, *words, "--rendezvous", f"127.0.0.1:{free_port()}")
    lost = Agent(file, *words, "--rendezvous", "192.0.2.1:29400")
    misspelt = Agent(file, *words, "--rendezvous", "nod-1.invalid:29400")
    assert [agent.finish(90) for agent in (alone, lost, misspelt)] == [1, 1, 1]
    assert "waiting for 1 more host to start the same command: 1 of 2 is there (me)" in alone.text
    assert "1 host came within 12s, at least 2 are needed (--wait)" in alone.text
    assert "nobody answers at 192.0.2.1:29400 (" in lost.text
    assert "nobody could be reached at 192.0.2.1:29400 within 12s (--wait)" in lost.text
    assert "nobody answers at nod-1.invalid:29400 (nod-1.invalid is not known here" in misspelt.text
    assert "give every host the same --rendezvous" in misspelt.text
    for agent in (alone, lost, misspelt):
        assert agent.text.count("giving up after 12s") == 1, "once in 12 seconds"


@pytest.mark.parametrize("words, said", [
    (("--wait", "soon"), "--wait = 'soon': expected a duration such as 200ms, 30s or 10min"),
    (("--wait", "0.5s"), "--wait = '0.5s': must be at least 1s"),
    (("--patience", "1"), "--patience = '1': must be at least 3s"),
    (("--grace", "5 parsecs"), "--grace = '5 parsecs': unknown unit"),
    (("--hosts", "2", "--last-call", "10s"), "--last-call = '10s': --hosts 2 starts as soon as all are there"),
])  # fmt: skip
def test_times_that_cannot_be_meant(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cli.write_run(tmp_path / "run", tiny_run(tmp_path))
    with pytest.raises(SystemExit) as left:
        command_line.main(["node", str(file), *words])
    assert left.value.code == 2 and said in capsys.readouterr().err


def test_times_have_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere else; a number alone is seconds."""
    seen: list[node.NodeOptions] = []
    monkeypatch.setattr(node, "run_node", lambda file, overrides, asked: seen.append(asked) or 0)
    for words in (["--wait", "10min", "--grace", "90", "--patience", "1min", "--last-call", "500ms"], []):
        with pytest.raises(SystemExit):
            command_line.main(["node", "run.yaml", *words])
    given, usual = seen
    assert (given.wait, given.grace, given.patience, given.last_call) == (600, 90, 60, 0.5)
    assert (usual.wait, usual.grace, usual.patience, usual.last_call) == (1800, 300, 15, None)
    code, out, _ = cli.command("node", "--help")
    assert code == 0 and "10min" in out and "30min" in out


def test_the_reason_is_of_this_round(tmp_path: Path) -> None:
    log = tmp_path / "rank-3.log"
    log.write_text("--- round 1: x\nerror: old\n--- round 2: y\nnoise\nerror: train.steps: bad\n  → mend it\n")
    assert _reason(log, 2) == "train.steps: bad\n  → mend it"
    log.write_text("--- round 1: x\nTraceback\n  File\nValueError: no\n")
    assert "ValueError: no" in _reason(log, 1) and "rank-3" in _reason(log, 1)
    assert "SIGKILL" in _reason(log, -signal.SIGKILL)


def test_a_mistake_is_told_once_and_not_started_anew(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, data={"train": str(tmp_path / "nothing.jsonl"), "sequence_length": 192})
    both = agents(cli.write_run(tmp_path / "run", run), 2)
    assert [agent.finish(90) for agent in both] == [2, 2]
    text = "\n".join(agent.text for agent in both)
    assert text.count("error: data.train") == 1 and "round 2" not in text, text


def test_a_killed_rank_is_started_anew_and_the_run_ends_well(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, train__steps=40, parallel__zero=2, checkpoint={"every": 5})
    both = agents(cli.write_run(tmp_path / "run", run), 2)
    try:
        cli.wait_for_step(both[0].process, tmp_path / "out", 12)
        cli.kill_rank(both[1].process, 1)
        assert [agent.finish(120) for agent in both] == [0, 0]
    finally:
        for agent in both:
            agent.end()
    assert "restart 1 of 3" in both[0].text and "round 2: 2 hosts" in both[0].text
    assert list(cli.losses(tmp_path / "out")) == list(range(1, 41))
    assert (tmp_path / "out/model/model.safetensors").is_file() and not (tmp_path / "out/.hosts").exists()


def test_stopping_one_agent_saves_and_ends_all(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, train__steps=5000, parallel__zero=2)
    both = agents(cli.write_run(tmp_path / "run", run), 2)
    try:
        cli.wait_for_step(both[0].process, tmp_path / "out", 3)
        both[1].process.send_signal(signal.SIGTERM)
        assert [agent.finish(60) for agent in both] == [143, 143]
    finally:
        for agent in both:
            agent.end()
    assert "host-1 was asked to stop" in both[0].text
    (checkpoint,) = (tmp_path / "out/checkpoints").glob("step-*")
    last = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert checkpoint.name == f"step-{last:08d}", "saved where it stopped"


@pytest.mark.slow
def test_a_host_that_withdraws_leaves_the_others_to_go_on(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, train__steps=60, parallel__zero=2)
    file = cli.write_run(tmp_path / "run", run)
    meet = [
        "--hosts",
        "1:2",
        "--rendezvous",
        f"127.0.0.1:{free_port()}",
        "--ranks",
        "1",
        "--withdraw",
        "--patience",
        "6",
    ]
    first = Agent(file, *meet, "--name", "host-0")
    first.when("hosts meet here")
    second = Agent(file, *meet, "--name", "host-1")
    try:
        first.when("1 of 2 ranks on 2 hosts")
        cli.wait_for_step(first.process, tmp_path / "out", 5)
        second.process.send_signal(signal.SIGTERM)
        assert second.finish(60) == 143
        first.when("1 of 1 ranks on 1 hosts", after=second.lines[-1][0])
        assert first.finish(120) == 0
    finally:
        first.end()
        second.end()
    assert "leaving: the ranks of all hosts save, and the others go on" in second.text
    saved = min(int(path.name.partition("-")[2]) for path in (tmp_path / "out/checkpoints").glob("step-*"))
    assert 5 <= saved < 60, "they saved as it left: without that there is no checkpoint before the last"
    assert list(cli.losses(tmp_path / "out")) == list(range(1, 61))


def test_an_output_folder_of_each_hosts_own_is_told(tmp_path: Path) -> None:
    port = free_port()
    several = []
    for number in range(2):
        run = tiny_run(tmp_path, output=str(tmp_path / f"out-{number}"))
        file = cli.write_run(tmp_path / f"run-{number}", run)
        meet = ["--hosts", "2", "--rendezvous", f"127.0.0.1:{port}", "--ranks", "1", "--id", "same"]
        several.append(Agent(file, *meet, "--name", f"host-{number}"))
    assert [agent.finish(60) for agent in several] == [2, 2]
    assert any("does not see there what" in agent.text and "all hosts share" in agent.text for agent in several)
