"""Three hosts, one cut off: the run goes on with two and takes the third back, and no example is lost or repeated."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import cli
from support.hosts import Agent, Host, some_hosts
from support.tiny import tiny_run, tokenizer_folder

from shardwise.checkpoint import host_copies
from shardwise.checkpoint.folders import list_checkpoints

STEPS = 140
PATIENCE = 6.0


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with some_hosts(3) as hosts:
        yield hosts


def resumed(folder: Path, name: str, checkpoint: Path, run: dict[str, object], ranks: int) -> Path:
    """The run gone on from a checkpoint on one host, undisturbed."""
    output = folder / name
    file = cli.write_run(folder / f"{name}-run", run | {"output": str(output), "resume": str(checkpoint)})
    code, _, err = cli.train(file, f"ranks={ranks}")
    assert code == 0, err
    return output


def steps_kept(output: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in (output / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_is_cut_off_and_comes_back(tmp_path: Path, three_hosts: list[Host]) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    every = {"every": 10, "keep": 1000}
    run = tiny_run(tmp_path, train__steps=STEPS, parallel__zero=3, timeout="10min", checkpoint=every)
    file, output = cli.write_run(tmp_path / "run", run), Path(run["output"])
    meet = ["--hosts", "2:3", "--rendezvous", f"{three_hosts[0].address}:29400", "--patience", str(PATIENCE)]
    agents = [Agent(file, *meet, "--name", f"host-{n}", inside=host.inside) for n, host in enumerate(three_hosts)]
    first, _, third = agents
    try:
        cli.wait_for_step(first.process, output, 25)
        three_hosts[2].cut()
        cut = time.monotonic()
        noticed = first.when("host-2 (10.214.78.3) has been silent")
        gone_on = first.when("round 2: 1 of 2 ranks on 2 hosts")
        at_two = steps_kept(output)[-1]
        third.when("trying to meet the others again")
        cli.wait_for_step(first.process, output, at_two + 25)
        three_hosts[2].mend()
        back = first.when("host-2 (10.214.78.3) has come", after=noticed)
        saved = first.when("ranks saved and stopped", after=back)
        joined = first.when("round 3: 1 of 3 ranks on 3 hosts")
        at_three = steps_kept(output)[-1]
        codes = [agent.finish() for agent in agents]
    finally:
        for agent in agents:
            agent.end()
        print("\n\n".join(agent.text for agent in agents))
        (tmp_path / "agents.txt").write_text("\n\n".join(agent.text for agent in agents))
    assert codes == [0, 0, 0]
    print(f"cut → noticed {noticed - cut:.1f} s → two hosts start {gone_on - noticed:.1f} s")
    print(f"back → saved {saved - back:.1f} s → three hosts start {joined - saved:.1f} s; steps {at_two}, {at_three}")
    assert noticed - cut < 10 * PATIENCE and joined - back < 180  # a lost connection alone is noticed after minutes
    assert at_two % 10 == 0 and at_three > at_two + 20

    losses = cli.losses(output)  # asserts that no step is there twice
    assert list(losses) == list(range(1, STEPS + 1))
    two = resumed(tmp_path, "two", output / f"checkpoints/step-{at_two:08d}", run, 2)
    again = cli.losses(two)
    assert {s: losses[s] for s in range(at_two + 1, at_three + 1)} == {
        s: again[s] for s in range(at_two + 1, at_three + 1)
    }, "with two hosts: bit for bit what two ranks on one host do"
    three = resumed(tmp_path, "three", output / f"checkpoints/step-{at_three:08d}", run, 3)
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (output, three))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), "the model is that of an undisturbed resume"
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_meeting_place_is_cut_off_and_an_agent_dies(tmp_path: Path, three_hosts: list[Host]) -> None:
    """Both must be there: they wait for each other as long as it takes, and go on from the newest checkpoint."""
    tokenizer_folder(tmp_path / "tokenizer")
    every = {"every": 5, "keep": 2}
    run = tiny_run(tmp_path, train__steps=90, parallel__zero=2, timeout="10min", checkpoint=every)
    file, output = cli.write_run(tmp_path / "run", run), Path(run["output"])
    meet = ["--hosts", "2", "--rendezvous", f"{three_hosts[0].address}:29400", "--patience", str(PATIENCE)]
    agents = [Agent(file, *meet, "--name", f"host-{n}", inside=host.inside) for n, host in enumerate(three_hosts[:2])]
    try:
        cli.wait_for_step(agents[0].process, output, 12)
        three_hosts[0].cut()
        agents[1].when("trying to meet the others again")
        agents[0].when("host-1 (10.214.78.2) has been silent")
        ranks = cli.rank_processes(agents[1].process)
        assert cli.all_gone([rank for rank in ranks if "shardwise.cli.rank_process" in rank.cmdline()])
        three_hosts[0].mend()
        agents[0].when("round 2: 1 of 2 ranks on 2 hosts")
        cli.wait_for_step(agents[0].process, output, cli.steps_done(output) + 10)
        inner = [p for p in cli.rank_processes(agents[1].process) if "node" in p.cmdline()]
        below = cli.rank_processes(agents[1].process)
        for process in inner:
            process.kill()
        agents[1].end()
        assert cli.all_gone(below), "ranks end with their agent"
        agents.append(Agent(file, *meet, "--name", "host-1", inside=three_hosts[1].inside))
        agents[0].when("round 3: 1 of 2 ranks on 2 hosts")
        assert agents[0].finish() == 0 and agents[2].finish() == 0
    finally:
        for agent in agents:
            agent.end()
        print("\n\n".join(agent.text for agent in agents))
    assert list(cli.losses(output)) == list(range(1, 91))
    assert "restart" not in agents[0].text, "lost hosts are no failures of the run"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_others_go_on_from_memory_without_a_host(tmp_path: Path, three_hosts: list[Host]) -> None:
    """Its part is in its neighbour's memory, and nothing is on disk; it comes back with nothing."""
    tokenizer_folder(tmp_path / "tokenizer")
    every = {"every": 1000, "keep": 1000, "memory": 3}
    run = tiny_run(tmp_path, train__steps=80, parallel__zero=3, timeout="10min", checkpoint=every)
    file, output = cli.write_run(tmp_path / "run", run), Path(run["output"])
    meet = ["--hosts", "2:3", "--rendezvous", f"{three_hosts[0].address}:29400", "--patience", str(PATIENCE)]
    agents = [Agent(file, *meet, "--name", f"host-{n}", inside=host.inside) for n, host in enumerate(three_hosts)]
    first = agents[0]
    try:
        cli.wait_for_step(first.process, output, 20)
        power_off(agents[2], output, "host-2")
        first.when("round 2: 1 of 2 ranks on 2 hosts")
        first.when("going on from the copy of step")
        found = int(first.text.rpartition("going on from the copy of step ")[2].split()[0])
        assert found >= 9 and not list_checkpoints(output / "checkpoints")
        cli.wait_for_step(first.process, output, found + 8)
        agents.append(Agent(file, *meet, "--name", "host-2", inside=three_hosts[2].inside))
        first.when("round 3: 1 of 3 ranks on 3 hosts")
        (saved,) = steps_kept(output)  # as it comes back the others save to disk
        codes = [agent.finish() for agent in (agents[0], agents[1], agents[3])]
    finally:
        for agent in agents:
            agent.end()
        print("\n\n".join(agent.text for agent in agents))
    assert codes == [0, 0, 0] and saved >= found + 8
    losses = cli.losses(output)
    assert list(losses) == list(range(1, 81))
    three = resumed(tmp_path, "three", output / f"checkpoints/step-{saved:08d}", run, 3)
    assert {step: loss for step, loss in losses.items() if step > saved} == cli.losses(three)
    assert nothing_left(output)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("memory", [3, None], ids=["memory", "disk"])
def test_a_host_comes_back_with_nothing(tmp_path: Path, three_hosts: list[Host], memory: int | None) -> None:
    """Both hosts are needed: the one that stayed gives the other its part; losses as if nothing had happened."""
    tokenizer_folder(tmp_path / "tokenizer")
    run = tiny_run(tmp_path, train__steps=60, parallel__zero=3, timeout="10min")
    run["checkpoint"] = {"every": 20, "keep": 2, "memory": memory}
    file, output = cli.write_run(tmp_path / "run", run), Path(run["output"])
    meet = ["--hosts", "2", "--rendezvous", f"{three_hosts[0].address}:29400", "--patience", str(PATIENCE)]
    agents = [Agent(file, *meet, "--name", f"host-{n}", inside=host.inside) for n, host in enumerate(three_hosts[:2])]
    try:
        cli.wait_for_step(agents[0].process, output, 37)
        power_off(agents[1], output, "host-1")
        gone, reached = time.monotonic(), cli.steps_done(output)
        agents.append(Agent(file, *meet, "--name", "host-1", inside=three_hosts[1].inside))
        started = agents[0].when("round 2: 1 of 2 ranks on 2 hosts")
        agents[0].when("going on from", after=started)
        while cli.steps_done(output) >= reached:  # until the steps that are done again are forgotten
            time.sleep(0.02)
        cli.wait_for_step(agents[0].process, output, reached)
        again = time.monotonic()
        assert agents[0].finish() == 0 and agents[2].finish() == 0
    finally:
        for agent in agents:
            agent.end()
        print("\n\n".join(agent.text for agent in agents))
    told = next(line for _, line in agents[0].lines if "going on from" in line)
    print(f"round 2 after {started - gone:.1f} s; step {reached} again after {again - gone:.1f} s; {told}")
    if memory is not None:
        assert (
            int(told.split("step ")[1].split()[0]) >= reached - 3 * memory
            and "the newest on disk is of step 20" in told
        )
        assert nothing_left(output)
    else:
        assert "step-00000020" in told
    alone = tiny_run(tmp_path, train__steps=60, parallel__zero=3, ranks=2, output=str(tmp_path / "alone"))
    code, _, err = cli.train(cli.write_run(tmp_path / "alone-run", alone))
    assert code == 0, err
    assert cli.losses(output) == cli.losses(tmp_path / "alone")


def power_off(agent: Agent, output: Path, name: str) -> None:
    """The host is gone at once: its agent, its ranks, and what it had in memory."""
    below = cli.rank_processes(agent.process)
    for process in below:
        process.kill()
    agent.end()
    assert cli.all_gone(below)
    host_copies.forget_copies(output, name)


def nothing_left(output: Path) -> bool:
    life = host_copies.read_life(output / "checkpoints")
    return life is not None and not (host_copies.root() / life.token).exists()
