"""`shardwise bench train RUN.yaml`: speed of a run on this machine, the profile of a step, and what would help.

The run's own code takes its steps on its own model, with random weights and full rows of random tokens: neither weights
nor data are read. On several ranks of this machine each takes its part.

[Note: one rank of a world] With `--nodes` and `--gpus` this process is one rank of that many, whose collectives return
at once: real kernels, real memory, real work of the host, no network. What arrives from other ranks is what the buffers
held before, so losses mean nothing. A pipeline's later stages need to know what reaches them: the stages before them
are rehearsed first, on tensors without memory.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from shardwise.config.load import LoadedRun, load_run
from shardwise.config.resolve import this_machine
from shardwise.config.schema import Run
from shardwise.core.errors import Interrupted, RunFailed, UserError
from shardwise.core.hardware.flops import flops_per_token, peak_flops
from shardwise.distributed.mesh import World, init_world
from shardwise.foresight.rehearse.batch import check_division
from shardwise.foresight.rehearse.step import Alike, rehearse
from shardwise.foresight.rehearse.subprocess import run_isolated
from shardwise.foresight.rehearse.target import Target, aim_at
from shardwise.foresight.rehearse.world import fake_world
from shardwise.foresight.verify.ranks import first_failure, heeding_interrupts, stopped_by_sigterm
from shardwise.foresight.verify.ranks import ranks as started
from shardwise.nn.models.source import ModelSource
from shardwise.observe.profile import StepProfile, profile_step
from shardwise.observe.profile_advice import Speed, advise, show_profile

WARM_UP = 3


@dataclass(frozen=True)
class SimulatedRank:
    """One rank of a world of which it alone is here."""

    rank: int
    ranks: int


def run_bench(
    file: Path,
    overrides: list[str],
    steps: int,
    documents: int,
    as_json: bool,
    trace: Path | None = None,
    world: tuple[int, int, int] | None = None,
) -> None:
    """Measures and prints; each rank's trace of one step is written to the folder `trace`.

    `world`: nodes, GPUs per node and the rank to be, if this process stands for one rank of them.
    """
    if "WORLD_SIZE" in os.environ:
        problem = "this command starts the ranks of one machine itself"
        raise UserError("WORLD_SIZE", os.environ["WORLD_SIZE"], problem, "run it without torchrun")
    console = Console(highlight=False, stderr=as_json)
    status = Console(highlight=False, stderr=True)
    try:
        with heeding_interrupts() as check, status.status("finding the model") as spinner:
            target, simulated = _aim(load_run(file, overrides), world)
            check_division(target.run, documents)
            if not status.is_terminal:
                status.print(f"{WARM_UP + steps + 1} steps of {target.source.label}")
            speed = measure(target, steps, documents, spinner.update, check, trace, simulated)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was measured", 130) from None
    advice = advise(target.run, speed)
    if as_json:
        values = {"run": str(file), "tokens_per_second": speed.tokens_per_second, "advice": advice} | asdict(speed)
        print(json.dumps(values, indent=1))
        return
    show(target, speed, documents, advice, console)


def measure(
    target: Target,
    steps: int,
    documents: int = 1,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    trace: Path | None = None,
    simulated: SimulatedRank | None = None,
) -> Speed:
    """Starts the run's ranks on this machine, takes the steps, and returns the speed.

    With `simulated` that is one process, which stands for one rank of the run (see the note above).
    """
    run = target.run
    stopping = stopped_by_sigterm("nothing was measured")
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name, stopping:
        folder = Path(name)
        values = run.model_dump(mode="json") | {"output": str(folder / "out")}
        rendezvous = {"device": run.device, "timeout": run.timeout, "backend": run.backend}
        (folder / "ranks").mkdir()
        (folder / "ranks" / "meet.json").write_text(json.dumps(rendezvous))
        ranks = target.ranks if simulated is None else 1
        work = {"kind": "bench", "run": values, "steps": steps, "documents": documents, "ranks": ranks}
        work["progress"] = str(folder / "progress")
        if simulated is not None:
            work["simulated"] = asdict(simulated)
        if trace is not None:
            work["trace"] = str(_folder_for(trace))
        with (
            started(run.precision, str(run.device), folder) as host,
            _progress(folder / "progress", target, steps, say),
        ):
            check()
            results = host.ask(work | {"folder": str(folder / "ranks")})
    if (failure := first_failure(results)) is not None:
        raise RunFailed(f"a rank failed: {failure[1]['failed']}")
    rank, slowest = max(enumerate(results), key=lambda entry: entry[1]["seconds"])
    peak = peak_flops(slowest["device"], str(run.precision)) if run.device == "cuda" else None
    tokens = run.train.batch_size * run.data.sequence_length
    mfu = slowest["flops"] * tokens / slowest["seconds"] / (peak * target.ranks) if peak else None
    memory = max((entry["memory"] for entry in results if entry["memory"]), default=None)
    capacity = slowest["room"]
    profile = StepProfile(**slowest["profile"] | {"largest": [tuple(line) for line in slowest["profile"]["largest"]]})
    lines = results[0]["told"]
    if simulated is not None:
        rank = simulated.rank
    return Speed(
        slowest["seconds"], tokens, mfu, memory, capacity, slowest["device"], target.ranks, rank, profile, lines,
        slowest["host"], simulated is not None,
    )  # fmt: skip


def _aim(loaded: LoadedRun, world: tuple[int, int, int] | None) -> tuple[Target, SimulatedRank | None]:
    """The run on this machine, or as one rank of a world."""
    machine = this_machine()
    if world is None:
        return aim_at(loaded, machine), None
    nodes, gpus, rank = world
    ranks = nodes * gpus
    if rank >= ranks:
        raise UserError("--rank", rank, f"there are {ranks} ranks", f"give one from 0 to {ranks - 1}")
    return aim_at(loaded, replace(machine, ranks=ranks)), SimulatedRank(rank, ranks)


def _folder_for(trace: Path) -> Path:
    try:
        trace.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"no folder can be made there: {error.strerror}"
        raise UserError("--trace", str(trace), problem, "name a folder that is there, or a new one") from None
    if not os.access(trace, os.W_OK):
        raise UserError("--trace", str(trace), "may not be written to", "name another folder")
    return trace.absolute()


@contextmanager
def _progress(file: Path, target: Target, steps: int, say: Callable[[str], None]) -> Iterator[None]:
    """Reports every half second how many steps the first rank has taken."""
    done = threading.Event()
    total_steps = WARM_UP + steps + 1

    def report() -> None:
        while not done.wait(0.5):
            steps_done = file.stat().st_size if file.exists() else 0
            label = f"{target.source.label} on {target.ranks} rank(s)"
            say(f"{label}: step {steps_done} of {total_steps}" if steps_done else f"{label}: building the model")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def bench_rank(work: dict[str, Any]) -> dict[str, Any]:
    """One rank's part, in its own process."""
    if "simulated" not in work:
        return _bench_rank(work, init_world(Run.model_validate(work["run"])), None)
    simulated = SimulatedRank(**work["simulated"])
    run = Run.model_validate(work["run"])
    known = None
    if simulated.rank >= simulated.ranks // run.parallel.pipeline:  # a later stage must know what reaches it
        known = run_isolated(_boundaries, run, simulated.ranks, work["documents"])
    with fake_world(run, simulated.rank, simulated.ranks, run.device) as world:
        return _bench_rank(work, world, known)


def _boundaries(run: Run, ranks: int, documents: int) -> dict[Any, Any]:
    """What passes between pipeline stages, as the first one's rehearsal finds it."""
    known = Alike()
    rehearse(_source(run, []), run, 0, ranks, documents=documents, known=known)
    return dict(known)


def _source(run: Run, lines: list[str]) -> ModelSource:
    from shardwise.config.resolve import Resolution, task_wanted
    from shardwise.foresight.plan.models import find_config
    from shardwise.nn.models.adapt import settle_attention

    return settle_attention(Resolution(run), find_config(run.model, task_wanted(run)), lines.append)


def _bench_rank(work: dict[str, Any], world: World, known: dict[Any, Any] | None) -> dict[str, Any]:
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up
    from shardwise.train.loop import accumulate

    run = Run.model_validate(work["run"])
    lines: list[str] = []
    source = _source(run, lines)
    parts, _ = set_up(source, run, world, None, lines.append)
    give_values(parts.sharded.model)
    if known is not None:
        parts.context.pipeline._known = Alike(known)
    count = max(1, run.train.batch_size // world.layout.data // int(run.train.micro_batch_size))
    batch = step_batch(run, count, work["documents"])
    for micro in batch.micro_batches[:1]:
        micro.input_ids.random_(0, source.config.get_text_config().vocab_size)

    progress = Path(work["progress"]) if world.is_main or "simulated" in work else None

    def step() -> None:
        if progress is not None:
            with progress.open("a") as file:
                file.write(".")
        accumulate(parts, batch)  # type: ignore[arg-type]

    cuda = world.device.type == "cuda"
    wait = (lambda: torch.cuda.synchronize(world.device)) if cuda else (lambda: None)
    for _ in range(WARM_UP):
        step()
        parts.update()
    wait()
    if world.size > 1:
        dist.barrier()
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    started = time.perf_counter()
    busy = time.process_time()
    for _ in range(work["steps"]):
        step()
        parts.update()
    host = (time.process_time() - busy) / work["steps"]
    wait()
    seconds = (time.perf_counter() - started) / work["steps"]
    trace = Path(work["trace"]) / f"rank-{world.rank}.json" if "trace" in work else None
    profile = profile_step(step, lambda: parts.update() and None, world.device, trace)
    return {
        "told": [line for line in lines if line.startswith("communication:")],
        "seconds": seconds, "host": host, "profile": asdict(profile),
        "flops": _flops_per_token(source, run, parts.sharded.embedding_only_numel),
        "memory": torch.cuda.max_memory_allocated(world.device) if cuda else None,
        "room": torch.cuda.get_device_properties(world.device).total_memory if cuda else None,
        "device": torch.cuda.get_device_name(world.device) if cuda else "CPU",
    }  # fmt: skip


@torch.no_grad()
def give_values(model: torch.nn.Module) -> None:
    """Fills the weights with realistic values: zeros multiply faster, and uninitialised memory slower."""
    from shardwise.optim.shards import local_of

    for parameter in model.parameters():
        if parameter.is_floating_point():
            local_of(parameter).normal_(0, 0.02)
    for module in model.modules():
        for name, packing in getattr(module, "packings", {}).items():
            local = local_of(getattr(module, name))
            rows = torch.randn(*local.shape[:-1], packing.form.columns, device=local.device) * 0.02
            local.copy_(packing.pack(rows))


def _flops_per_token(source: Any, run: Run, embedding_only_numel: int) -> float:
    """FLOPs per token."""
    from shardwise.nn.adapters.apply import apply_method
    from shardwise.nn.models.build import build_on_meta

    adapted = apply_method(build_on_meta(source), run)
    config = source.config.get_text_config()
    return flops_per_token(
        adapted.parameters, embedding_only_numel, config.num_hidden_layers, config.hidden_size,
        run.data.sequence_length, adapted.frozen,
        stacks=2 if config.is_encoder_decoder else 1, causal=source.task == "causal",
    )  # fmt: skip


def show(target: Target, speed: Speed, documents: int, advice: list[str], console: Console) -> None:
    """Prints the result for people."""
    run = target.run
    console.print(
        f"{target.source.label} on {speed.ranks} × {speed.device}: {run.train.batch_size} rows of "
        f"{run.data.sequence_length:,} tokens{f' ({documents} documents each)' if documents > 1 else ''} a step, "
        f"{run.computes_in}"
    )
    if speed.simulated:
        console.print(
            f"this process as rank {speed.rank} of {speed.ranks}; collectives return at once: no network time"
        )
    mfu = f", MFU {speed.mfu:.1%}" if speed.mfu is not None else " (MFU and memory: on GPUs)" * (speed.device == "CPU")
    memory = f", peak {speed.memory / 2**30:.1f} of {speed.room / 2**30:.1f} GiB" if speed.memory and speed.room else ""
    pace = f"[bold]{speed.tokens_per_second:,.0f} tokens/s[/bold]"
    if speed.simulated:
        pace = f"{pace} of all {speed.ranks} ranks at this pace"
    console.print(f"{pace}, {speed.seconds * 1e3:,.1f} ms a step{mfu}{memory}")
    if speed.device != "CPU":
        kernels = speed.profile.whole - speed.profile.idle
        console.print(f"kernels {kernels * 1e3:,.1f} ms, host {speed.host * 1e3:,.1f} ms of the step")
    show_profile(speed, advice, console)
