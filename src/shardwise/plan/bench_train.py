"""`shardwise bench train RUN.yaml`: a run's own speed on this machine, what a step is made of, and what would help.

The run's own code takes its steps on its own model, with values at random and full rows of them: neither weights nor
data are read. On several ranks of this machine each takes its part.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from shardwise.config.load import load_run
from shardwise.config.resolve import this_machine
from shardwise.config.schema import Run
from shardwise.errors import Interrupted, RunFailed, UserError
from shardwise.observe.hardware import flops_per_token, peak_flops
from shardwise.observe.profile import REST, Profile, profile_step
from shardwise.rehearse.batch import check_division
from shardwise.rehearse.target import Target, aim_at
from shardwise.verify.ranks import first_failure, heeding_interrupts, stopped_by_sigterm
from shardwise.verify.ranks import ranks as started

WARM_UP = 3


@dataclass(frozen=True)
class Speed:
    """What was measured: of the slowest rank, and together."""

    seconds: float  # a step
    tokens: int  # of a step, over all ranks
    mfu: float | None
    memory: int | None  # bytes at the peak, of the fullest rank; of a GPU
    room: int | None  # that it has
    device: str
    ranks: int
    rank: int  # the slowest
    profile: Profile
    told: list[str] = field(default_factory=list)  # what was chosen at the start, by measurement

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run_bench(
    file: Path, overrides: list[str], steps: int, documents: int, as_json: bool, trace: Path | None = None
) -> None:
    """Measures and prints; `trace`: a folder for each rank's trace of one step."""
    if "WORLD_SIZE" in os.environ:
        problem = "this command starts the ranks of one machine itself"
        raise UserError("WORLD_SIZE", os.environ["WORLD_SIZE"], problem, "run it without torchrun")
    console, status = Console(highlight=False, stderr=as_json), Console(highlight=False, stderr=True)
    try:
        with heeding_interrupts() as check, status.status("finding the model") as shown:
            target = aim_at(load_run(file, overrides), this_machine())
            check_division(target.run, documents)
            if not status.is_terminal:
                status.print(f"{WARM_UP + steps + 1} steps of {target.source.label}")
            speed = measure(target, steps, documents, shown.update, check, trace)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was measured", 130) from None
    advice = advise(target.run, speed)
    if as_json:
        told = {"run": str(file), "tokens_per_second": speed.tokens_per_second, "advice": advice} | asdict(speed)
        print(json.dumps(told, indent=1))
        return
    show(target, speed, documents, advice, console)


def measure(
    target: Target,
    steps: int,
    documents: int = 1,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    trace: Path | None = None,
) -> Speed:
    """Starts the run's ranks on this machine and takes the steps."""
    run = target.run
    stopping = stopped_by_sigterm("nothing was measured")
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name, stopping:
        folder = Path(name)
        values = run.model_dump(mode="json") | {"output": str(folder / "out")}
        meeting = {"device": run.device, "timeout": run.timeout, "backend": run.backend}
        (folder / "ranks").mkdir()
        (folder / "ranks" / "meet.json").write_text(json.dumps(meeting))
        work = {"kind": "bench", "run": values, "steps": steps, "documents": documents, "ranks": target.ranks}
        work["progress"] = str(folder / "progress")
        if trace is not None:
            work["trace"] = str(_folder_for(trace))
        with started(run.precision, str(run.device), folder) as host, _told(folder / "progress", target, steps, say):
            check()
            found = host.ask(work | {"folder": str(folder / "ranks")})
    if (failure := first_failure(found)) is not None:
        raise RunFailed(f"a rank failed: {failure[1]['failed']}")
    rank, slowest = max(enumerate(found), key=lambda one: one[1]["seconds"])
    peak = peak_flops(slowest["device"], str(run.precision)) if run.device == "cuda" else None
    tokens = run.train.batch_size * run.data.sequence_length
    mfu = slowest["flops"] * tokens / slowest["seconds"] / (peak * target.ranks) if peak else None
    memory, room = max((one["memory"] for one in found if one["memory"]), default=None), slowest["room"]
    shape = Profile(**slowest["profile"] | {"largest": [tuple(line) for line in slowest["profile"]["largest"]]})
    told = found[0]["told"]
    return Speed(slowest["seconds"], tokens, mfu, memory, room, slowest["device"], target.ranks, rank, shape, told)


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
def _told(file: Path, target: Target, steps: int, say: Callable[[str], None]) -> Iterator[None]:
    """Says every half second how many steps the first rank has taken."""
    done, whole = threading.Event(), WARM_UP + steps + 1

    def tell() -> None:
        while not done.wait(0.5):
            taken = file.stat().st_size if file.exists() else 0
            where = f"{target.source.label} on {target.ranks} rank(s)"
            say(f"{where}: step {taken} of {whole}" if taken else f"{where}: building the model")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def bench_rank(work: dict[str, Any]) -> dict[str, Any]:
    """One rank's part, in its own process."""
    from shardwise.config.resolve import Resolution, task_wanted
    from shardwise.models.adapt import settle_attention
    from shardwise.parallel.mesh import init_world
    from shardwise.plan.models import find_config
    from shardwise.rehearse.batch import step_batch
    from shardwise.rehearse.step import set_up
    from shardwise.train.loop import accumulate

    run = Run.model_validate(work["run"])
    told: list[str] = []
    source = settle_attention(Resolution(run), find_config(run.model, task_wanted(run)), told.append)
    world = init_world(run)
    parts, _ = set_up(source, run, world, None, told.append)
    give_values(parts.sharded.model)
    count = max(1, run.train.batch_size // world.layout.data // int(run.train.micro_batch_size))
    batch = step_batch(run, count, work["documents"])
    for micro in batch.micro_batches[:1]:
        micro.input_ids.random_(0, source.config.get_text_config().vocab_size)

    progress = Path(work["progress"]) if world.is_main else None

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
    begun = time.perf_counter()
    for _ in range(work["steps"]):
        step()
        parts.update()
    wait()
    seconds = (time.perf_counter() - begun) / work["steps"]
    trace = Path(work["trace"]) / f"rank-{world.rank}.json" if "trace" in work else None
    found = profile_step(step, lambda: parts.update() and None, world.device, trace)
    return {
        "told": [line for line in told if line.startswith("communication:")],
        "seconds": seconds, "flops": _work_of(source, run, parts.sharded.lookup), "profile": asdict(found),
        "memory": torch.cuda.max_memory_allocated(world.device) if cuda else None,
        "room": torch.cuda.get_device_properties(world.device).total_memory if cuda else None,
        "device": torch.cuda.get_device_name(world.device) if cuda else "CPU",
    }  # fmt: skip


@torch.no_grad()
def give_values(model: torch.nn.Module) -> None:
    """Numbers as a model has them: zeros would be multiplied faster than those, and what memory held before slower."""
    from shardwise.optim.shards import local_of

    for parameter in model.parameters():
        if parameter.is_floating_point():
            local_of(parameter).normal_(0, 0.02)
    for module in model.modules():
        for name, packing in getattr(module, "packings", {}).items():
            local = local_of(getattr(module, name))
            rows = torch.randn(*local.shape[:-1], packing.form.columns, device=local.device) * 0.02
            local.copy_(packing.pack(rows))


def _work_of(source: Any, run: Run, lookup: int) -> float:
    """FLOPs that a token costs."""
    from shardwise.adapters.apply import apply_method
    from shardwise.models.build import build_on_meta

    adapted = apply_method(build_on_meta(source), run)
    config = source.config.get_text_config()
    return flops_per_token(
        adapted.parameters, lookup, config.num_hidden_layers, config.hidden_size, run.data.sequence_length,
        adapted.frozen, stacks=2 if config.is_encoder_decoder else 1, causal=source.task == "causal",
    )  # fmt: skip


def advise(run: Run, speed: Speed) -> list[str]:
    """What would make it faster, by what was measured; the largest gain first."""
    found, whole = speed.profile, speed.profile.whole or 1.0
    share = {kind: seconds / whole for kind, seconds in found.exposed.items()}
    idle = max(0.0, 1 - (found.whole - found.idle) / speed.seconds) if speed.device != "CPU" else 0.0
    cuda, said = run.device == "cuda", []
    if cuda and not run.compiled and share.get(REST, 0) > 0.12:
        said.append((share[REST] / 2, f"compile: true fuses norms and elementwise work, {share[REST]:.0%} of the step"))
    if idle > 0.1:
        how = "a larger micro_batch_size" + ("" if run.compiled else ", or compile: true,")
        said.append((idle, f"the GPU waits for the host {idle:.0%} of the time: {how} gives it longer kernels"))
    if (part := share.get("communication", 0)) > 0.1:
        ways = ["a larger micro_batch_size or more accumulation"]
        ways += ["zero: 2, if the weights fit"] if run.parallel.zero == 3 else []
        ways += ["parallel.secondary_shard within a node"] if run.parallel.zero == 3 and speed.ranks > 1 else []
        said.append((part, f"communication that nothing hides takes {part:.0%}: {', '.join(ways)}"))
    summed, spread = found.sent.get("reductions", [0.0, 0.0])[1] / whole, run.parallel
    if summed > 0.1 and spread.reduce == "fp32" and spread.zero >= 2 and not spread.quantize_gradients:
        gain = f"half of the {summed:.0%} that reductions take with nothing beside them"
        said.append((summed / 2, f"parallel.reduce: bf16 would save up to {gain}, and round the sums to it"))
    if cuda and (part := share.get("copies", 0)) > 0.1:
        said.append((part, f"copies that nothing hides take {part:.0%}: offload less, or compute more tokens a step"))
    if (part := share.get("optimizer", 0)) > 0.12:
        said.append((part / 2, f"the update takes {part:.0%}: more tokens a step (train.batch_size) spread its cost"))
    free = 1 - (speed.memory or 0) / speed.room if speed.room else 0.0
    if not cuda and (waits := found.idle / whole) > 0.25:
        way = "more micro-batches make a pipeline's bubble smaller" if run.parallel.pipeline > 1 else (
            "a larger micro_batch_size gives operators more to do")  # fmt: skip
        said.append((waits, f"Python, and waiting for other ranks, take {waits:.0%}: {way}"))
    if cuda and run.recompute == "full" and free > 0.3:
        said.append(
            (0.2, f"{free:.0%} of the memory is free: recompute: auto keeps what fits instead of computing it twice")
        )
    elif cuda and free > 0.5 and run.train.batch_size > int(run.train.micro_batch_size) * speed.ranks:
        said.append((0.05, f"{free:.0%} of the memory is free: a larger train.micro_batch_size makes larger products"))
    products = share.get("products", 0)
    if cuda and products > 0.5 and run.fp8.recipe == "none" and run.precision == "bf16":
        from shardwise.config.resolve import _has_fp8

        if _has_fp8(this_machine()):
            full = run.method.type == "full"
            how = "precision: fp8 with compile: true" if full else "method: {type: qlora, bits: fp8}"
            said.append((products / 3, f"products take {products:.0%}: {how} makes them in 8 bits"))
    return [text for _, text in sorted(said, key=lambda one: -one[0])]


def show(target: Target, speed: Speed, documents: int, advice: list[str], console: Console) -> None:
    """For people."""
    run = target.run
    console.print(
        f"{target.source.label} on {speed.ranks} × {speed.device}: {run.train.batch_size} rows of "
        f"{run.data.sequence_length:,} tokens{f' ({documents} documents each)' if documents > 1 else ''} a step, "
        f"{run.computes_in}"
    )
    mfu = f", MFU {speed.mfu:.1%}" if speed.mfu is not None else " (MFU and memory: on GPUs)" * (speed.device == "CPU")
    memory = f", peak {speed.memory / 2**30:.1f} of {speed.room / 2**30:.1f} GiB" if speed.memory and speed.room else ""
    console.print(
        f"[bold]{speed.tokens_per_second:,.0f} tokens/s[/bold], {speed.seconds * 1e3:,.1f} ms a step{mfu}{memory}"
    )
    show_profile(speed, advice, console)


def show_profile(speed: Speed, advice: list[str], console: Console) -> None:
    """What a step was made of, and what to change."""
    found = speed.profile
    whose = f" of rank {speed.rank}" if speed.ranks > 1 else ""
    title = f"one step{whose} under the profiler, which slows it down: {found.whole * 1e3:,.1f} ms"
    table = Table(title=title, title_justify="left")
    gpu = speed.device != "CPU"
    beside = gpu or bool(found.sent)
    for column in ("", "ms", "of the step", *(["nothing else beside it"] if beside else [])):
        table.add_column(column, justify="left" if not column else "right")
    for kind, seconds in found.kinds.items():
        alone = [f"{found.exposed[kind] * 1e3:,.1f}"] if beside else []
        table.add_row(kind, f"{seconds * 1e3:,.1f}", f"{seconds / found.whole:.0%}", *alone)
    rest = "idle (waits for the host)" if gpu else "Python and the rest"
    table.add_row(rest, f"{found.idle * 1e3:,.1f}", f"{found.idle / (found.whole or 1):.0%}", *([""] if beside else []))
    console.print(table)
    for kind, (spent, bare) in found.sent.items():
        hidden = f"{(spent - bare) * 1e3:,.1f} hidden behind computing, {bare * 1e3:,.1f} exposed"
        console.print(f"  {'collectives' if kind == 'all' else kind}: {spent * 1e3:,.1f} ms, {hidden}", markup=False)
    for line in speed.told:
        console.print(f"  {line}", markup=False)
    for name, seconds, count in found.largest[:5]:
        console.print(f"  {seconds * 1e3:8.1f} ms {count:5d} × {name[:90]}", style="dim", markup=False)
    for line in advice:
        console.print(f"→ {line}", markup=False)
    if not advice:
        console.print("→ nothing stands out: most of the step is the work itself")
