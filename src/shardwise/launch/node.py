"""The agent of a host: joins the rendezvous, runs this host's ranks, and joins again whenever the set of hosts changes.

Every launcher starts one agent on each host. Its behaviour:

  a host joins             the ranks of all hosts save (SIGTERM), and all restart with it from that checkpoint
  a host is lost           the others' ranks are killed, as they would wait for it forever; all restart without it
  this host is cut off     its ranks are killed before the others restart; it tries to rejoin them until it can
  a rank fails             all restart from the newest checkpoint, at most `restarts` times
  a rank has a user error  all end, with its message: restarting would not help
  SIGTERM or Ctrl-C here   the ranks of all hosts save, and all end
  SIGTERM with --withdraw  the ranks of all hosts save, and the others resume without this host (preemption)
  the launcher is gone     the same (--listen)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.checkpoint.folders import newest_step
from shardwise.checkpoint.host_copies import HOST_VARIABLE, forget_copies, newest_copy
from shardwise.config.units import in_words
from shardwise.core.errors import UserError
from shardwise.core.waiting import WaitReporter
from shardwise.launch import rendezvous_progress as waiting
from shardwise.launch.group import RankCommand, RankGroup, RanksEnded
from shardwise.launch.rendezvous import HostReport, Rendezvous, RoundOrder, Rules, Seat
from shardwise.launch.rendezvous_link import Keeper, Line, RendezvousAddress, free_port, interface_towards, lead
from shardwise.launch.token import HOW, take_token

TICK, BEAT = 0.1, 1.0  # seconds between looks at the ranks, and between reports
SHARED = 8.0  # seconds for another host's file to appear in the output folder
LAST_CALL = 5.0  # seconds to wait for more hosts once there are enough, unless told
GOODBYE = 10.0  # seconds that a finished host tries to hear that all others have finished too


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent: its host, the rendezvous, and its ranks."""

    name: str
    place: RendezvousAddress
    rules: Rules
    ranks: int
    wait: float  # seconds without enough hosts after which the host gives up
    output: Path
    listen: bool = False  # to a launcher, by standard input
    withdraw: bool = False  # on SIGTERM this host leaves, not all


@dataclass(frozen=True)
class NodeOptions:
    """Command-line options of `shardwise node`."""

    hosts: str
    rendezvous: str
    ranks: int | None = None
    restarts: int = 3
    grace: float = 300.0
    patience: float = 15.0
    last_call: float | None = None
    wait: float = 1800.0
    name: str | None = None
    id: str | None = None
    listen: bool = False
    withdraw: bool = False
    token_file: Path | None = None


class Node:
    """The agent's loop and state."""

    def __init__(self, settings: AgentSettings, plan: RankCommand) -> None:
        self._settings, self._plan = settings, plan
        self._line = Line(settings.place)
        self._keeper: Keeper | None = None
        self._group: RankGroup | None = None
        host = f"{settings.name}-{uuid.uuid4().hex[:8]}"
        self._report = HostReport(host, settings.name, settings.ranks, free_port(), "waiting")
        self._signals = 0
        now = time.monotonic()
        self._reached = now
        self._idle = now
        self._asked_at = now
        self._withdrawn = False
        self._silent = False  # whether it was told that nobody can be reached
        self._waiting = WaitReporter()

    def run(self) -> int:
        """Runs until the end of the run; returns the exit code."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's wish
            numbers.append(signal.SIGHUP)
        handled = {number: signal.signal(number, self._on_signal) for number in numbers}
        marker = self._marker(self._report.host)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        if self._settings.listen:
            threading.Thread(target=self._listen, daemon=True).start()
        code = 1
        try:
            code = self._loop()
        finally:
            if self._group is not None:
                self._group.kill()
            if self._keeper is not None:
                self._keeper.finish(self._settings.rules.patience + (self._plan.grace if code not in (0, 2) else 0))
            forget_copies(self._settings.output, self._settings.name)
            with contextlib.suppress(OSError):
                marker.unlink()
                marker.parent.rmdir()
            for number, handler in handled.items():
                signal.signal(number, handler)
        return code

    def _loop(self) -> int:
        place = self._settings.place
        heard_at = -BEAT
        rules = self._settings.rules
        more = "" if rules.most == rules.least else " or more"
        self._print(f"meeting {rules.least}{more} hosts at {place.host}:{place.port}")
        while True:
            before = self._report
            self._handle_signals()
            self._poll_ranks()
            if self._withdrawn and not self._signals:
                if self._group is None:
                    return 128 + signal.SIGTERM
                if self._group.stop():
                    self._print("leaving: the ranks of all hosts save, and the others go on")
            now = time.monotonic()
            if self._report != before or now - heard_at >= BEAT:
                heard_at = now
                code = self._sync()
                if code is not None:
                    return code
            time.sleep(TICK)

    def _sync(self) -> int | None:
        """Reports to the rendezvous and follows its order; returns the exit code at the end."""
        answer = self._line.ask(self._report)
        self._print_notes()
        now = time.monotonic()
        rules = self._settings.rules
        if answer is not None:
            if self._silent:
                self._print("the others can be reached again")
            self._reached, self._silent = now, False
            return self._follow_order(answer)
        place = self._settings.place
        unreachable = now - self._reached
        if self._keeper is None and self._group is None:
            self._keeper = lead(place, Rendezvous(rules, self._report.host), self._print)
            if self._keeper is not None:
                self._print(f"hosts meet here: {place.host}:{place.port}")
                if place.token is None and not place.is_loopback():
                    self._print(f"WARNING: no token: whoever reaches port {place.port} can join or end this run; {HOW}")
            elif unreachable > rules.patience and self._report.state == "waiting" and place.is_here():
                problem = "another program listens there"
                raise UserError("--rendezvous", f"{place.host}:{place.port}", problem, "use another port, on all hosts")
        if self._report.state == "done" and unreachable > GOODBYE:
            return 0  # the ranks of all have finished, or ours could not have
        if self._report.state == "leaving" and self._group is None:
            return self._report.code
        # Sooner than the keeper starts anew without us: two worlds must never write at the same time.
        if self._group is not None and unreachable > rules.patience * 2 / 3:
            self._group.kill()
            self._print(f"nobody can be reached for {unreachable:.0f} s: ranks ended; trying to meet the others again")
            self._silent, self._idle = True, now
        elif self._group is None and (waited := now - max(self._idle, self._reached)) > self._settings.wait:
            self._fail(waiting.gave_up(place, self._line.trouble, self._settings.wait))
            return 1
        elif self._group is None and self._keeper is None and self._waiting.due("nobody"):
            self._print(waiting.nobody(place, self._line.trouble, waited, self._settings.wait))
        return None

    def _follow_order(self, answer: RoundOrder) -> int | None:
        if self._group is not None:
            if answer.order == "stop" and self._group.stop():  # again and again: it kills when the grace is over
                self._asked_at = time.monotonic()
                self._print("asked the ranks to save and stop")
            elif answer.order == "kill" and not self._group.killed:
                self._group.kill()
                self._print("ranks ended: they cannot go on without the others")
        elif answer.order == "run":
            self._start(answer)
        elif answer.order == "end":
            self._report_end(answer)
            return answer.code
        elif answer.order == "wait":
            rules = self._settings.rules
            wait = self._settings.wait
            waited = time.monotonic() - self._idle
            keeps = self._keeper is not None
            if keeps and waited > wait:
                words = waiting.too_few(answer, rules, wait)
                self._report = replace(self._report, state="leaving", code=1, words=words)
            elif self._report.state == "waiting" and self._waiting.due((answer.there, answer.training)):
                self._print(waiting.for_others(answer, rules, self._settings.place, waited, wait if keeps else None))
        return None

    def _start(self, answer: RoundOrder) -> None:
        seats = answer.seats
        place = next(index for index, seat in enumerate(seats) if seat.host == self._report.host)
        if place and not self._shares_folder_with(seats[0]):
            words = (
                f"output = {str(self._settings.output)!r}: {self._settings.name} does not see there what "
                f"{seats[0].name} writes\n  → give a folder that all hosts share (NFS, Lustre, a mounted bucket)"
            )
            self._report = replace(self._report, state="mistake", code=2, words=words, round=answer.round)
            return
        others = [seat for index, seat in enumerate(seats) if index != place]
        interface = interface_towards(others[0].address if others else seats[0].address)
        self._waiting.over()
        self._group = RankGroup(self._plan, answer.round, seats, place, interface)
        self._report = replace(self._report, state="running", round=answer.round, code=0, words="")
        ranks = sum(seat.ranks for seat in seats)
        waited = time.monotonic() - self._idle
        share = f"{self._report.ranks} of {ranks} ranks on {len(seats)} hosts"
        self._print(f"round {answer.round}: {share}, after {waited:.1f} s")

    def _poll_ranks(self) -> None:
        group = self._group
        ended = group.poll() if group is not None else None
        if group is None or ended is None:
            return
        self._group = None
        self._idle = time.monotonic()
        if self._report.state == "leaving":
            return
        self._report = replace(self._report, **_outcome(group, ended), port=free_port(), step=self._newest())
        if self._report.state == "waiting" and group.asked and not group.killed:
            self._print(f"ranks saved and stopped in {time.monotonic() - self._asked_at:.1f} s")

    def _handle_signals(self) -> None:
        if not self._signals:
            return
        number = self._signals % 100
        repeated = self._signals >= 100
        if self._report.state != "leaving":
            self._print("stopping: the ranks of all hosts save, then all end; once more ends at once")
            self._report = replace(self._report, state="leaving", code=128 + number, words="")
        if self._group is not None:
            self._group.kill() if repeated else self._group.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._settings.withdraw and not self._withdrawn:
            self._withdrawn = True
            return
        self._signals = number if not self._signals else 100 + number

    def _report_end(self, answer: RoundOrder) -> None:
        if answer.code == 0:
            self._print("done")
        elif answer.code > 128:
            self._print(f"stopped: {answer.words}; the same command goes on from the last checkpoint")
        elif self._keeper is not None or answer.alone:  # one host tells what all ended of
            self._fail(answer.words)
        else:
            self._print(f"ended: {answer.words.splitlines()[0] if answer.words else ''}")

    def _print_notes(self) -> None:
        for note in self._keeper.notes() if self._keeper is not None else ():
            self._print(note)

    def _shares_folder_with(self, first: Seat) -> bool:
        deadline = time.monotonic() + min(SHARED, self._settings.rules.patience / 2)  # we are silent meanwhile
        while not self._marker(first.host).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(TICK)
        return True

    def _marker(self, host: str) -> Path:
        return self._settings.output / ".hosts" / host

    def _newest(self) -> int:
        """Newest step of the checkpoints, and of in-memory copies of which this host has a part."""
        output = self._settings.output
        return max(newest_step(output / "checkpoints"), newest_copy(output, self._settings.name, complete_only=False))

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # whoever listened may be gone
            print(f"{time.strftime('%H:%M:%S')} [{self._settings.name}] {text}", flush=True)

    def _fail(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"error: {text}", file=sys.stderr, flush=True)

    def _listen(self) -> None:
        """Reads our input for the launcher's stop request; end of input means the launcher is gone."""
        for line in sys.stdin:
            if line.strip() == "stop":
                self._on_signal(signal.SIGTERM, None)
        self._withdrawn = True


def _outcome(group: RankGroup, ended: RanksEnded) -> dict[str, Any]:
    if all(code == 0 for code in ended.codes):
        return {"state": "done"}
    if 2 in ended.codes and not group.killed:
        return {"state": "mistake", "code": 2, "words": ended.words}
    if group.killed or group.asked or ended.stopped:
        return {"state": "waiting"}
    return {"state": "failed", "code": 1, "words": ended.words}


def run_node(run_file: Path, overrides: list[str], options: NodeOptions) -> int:
    """Checks the run for every number of hosts, then runs this host's agent; returns the exit code."""
    from shardwise.config.load import load_run
    from shardwise.core.cpu_probe import threads_for
    from shardwise.launch.hosts import check_sizes, parse_hosts, ranks_here

    token = take_token(options.token_file)
    hosts = parse_hosts(options.hosts)
    run = load_run(run_file, overrides).run
    ranks = options.ranks or ranks_here(run)
    check_sizes(run, hosts, ranks)
    output = Path(run.output).expanduser().absolute()
    name = options.name or name_here()
    if not 0 < len(name) <= 200 or not name.isprintable() or "/" in name:
        raise UserError("--name", name, "is no name of a host", "use up to 200 letters, digits, - and .")
    if options.last_call is not None and hosts.least == hosts.most:
        problem = f"--hosts {hosts} starts as soon as all are there, so nobody is waited for then"
        raise UserError("--last-call", in_words(options.last_call), problem, "leave it out, or allow more: --hosts N:M")
    last_call = LAST_CALL if options.last_call is None else options.last_call
    place = RendezvousAddress.parse(options.rendezvous, options.id or str(output), token)
    rules = Rules(hosts.least, hosts.most, options.patience, last_call, options.restarts)
    settings = AgentSettings(name, place, rules, ranks, options.wait, output, options.listen, options.withdraw)
    arguments = ("train", str(run_file), *overrides)
    env = {HOST_VARIABLE: settings.name}
    command = RankCommand(arguments, output / "logs", threads_for(ranks), options.grace, env, run.timeout)
    return Node(settings, command).run()


def name_here() -> str:
    """This host's name in logs: the scheduler's name for it, else its hostname."""
    import socket

    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
