"""`shardwise plan`: what fits, how long it takes, what it costs, and why."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from shardwise.config.advanced import as_written
from shardwise.config.load import LoadedRun, load_run
from shardwise.config.paths import place
from shardwise.config.resolve import Machine, resolve_machine, resolve_model, resolve_objective, task_wanted
from shardwise.config.schema import Model, Run
from shardwise.config.units import human, parse_number
from shardwise.core.errors import UserError
from shardwise.core.hardware.specs import Cluster, cluster_of, this_machine
from shardwise.foresight.plan.estimate import Estimate, estimate
from shardwise.foresight.plan.explain import describe, guidelines, headline, long_time, money, reasons
from shardwise.foresight.plan.models import find_config, hub_name
from shardwise.foresight.plan.result import as_dict, estimate_dict
from shardwise.foresight.plan.search import BUDGET, Plan, search
from shardwise.foresight.rehearse.target import aim
from shardwise.nn.models.adapt import settle_attention
from shardwise.nn.models.source import ModelSource

LENGTH = 4096
THOROUGH = 60.0  # seconds for sketches
METHODS = ("full", "lora", "qlora", "ia3")
ADAPTERS = ("lora", "qlora")  # tried where full fine-tuning does not fit and no method was asked for


@dataclass(frozen=True)
class PlanOptions:
    """Options of the `shardwise plan` command line."""

    what: str
    overrides: list[str]
    nodes: int
    gpus: int | None
    gpu: str | None
    network: str | None
    price: float | None
    memory: float | None  # GB of each device
    tokens: str | None
    method: str | None
    thorough: bool


def run_plan(options: PlanOptions, write: Path | None, html: Path | None, as_json: bool) -> int:
    """Plans and prints the result. Returns 0 if a strategy fits, otherwise 1."""
    console = Console(highlight=False, stderr=as_json)
    _check(options, write, html)
    cluster = _cluster(options)
    loaded, is_file = _loaded(options)
    parallel_override = next((word for word in options.overrides if word.startswith("parallel")), None)
    if parallel_override is not None and not is_file:
        problem = "how a model is spread is what is planned; of a RUN.yaml, what is written is compared with it"
        raise UserError("override", parallel_override, problem, "leave it out, or write it into a RUN.yaml")
    values = loaded.run.model_dump(exclude_unset=True)
    tokens = _tokens(options.tokens)
    budget = THOROUGH if options.thorough else BUDGET
    plans: list[Plan] = []
    with console.status("") as status:
        methods = _methods(options, values, is_file)
        for method in methods:
            run, source = _resolved(values, method, cluster)
            plans.append(search(source, run, cluster, status.update, budget, last_resort=len(methods) == 1))
            best = plans[-1].best
            if best is not None:
                break
        else:
            if len(methods) > 1:
                run, source = _resolved(values, methods[0], cluster)
                plans.append(search(source, run, cluster, status.update, budget))
        written = _as_written(loaded, cluster, status.update) if is_file else None
    chosen = next((p for p in reversed(plans) if p.best is not None), plans[-1])
    if as_json:
        as_written_json = estimate_dict(written, tokens) if isinstance(written, Estimate) else written
        print(json.dumps(as_dict(chosen, tokens) | {"as_written": as_written_json}, indent=1))
    else:
        if written is not None:
            console.print(f"as written: {_written_line(written)}")
        for plan in plans:
            show(plan, console, tokens, short=plan is not chosen)
    if html is not None:
        from shardwise.foresight.plan.report import write_report

        with console.status("writing the report"):
            write_report(chosen, tokens, html)
        console.print(f"the report is {html}")
    if write is not None and chosen.best is not None:
        write.write_text(run_yaml(chosen, values, is_file))
        console.print(f"{write}: check the data, then run `shardwise train {write}`")
    return 0 if chosen.best is not None else 1


def _check(options: PlanOptions, write: Path | None, html: Path | None) -> None:
    """Rejects mistakes that can be found without a search."""
    for option, value in (("--price", options.price), ("--memory", options.memory)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(option, value, "must be above 0", f"e.g. {option} {'2.5' if option == '--price' else '24'}")
    for option, count in (("--nodes", options.nodes), ("--gpus", options.gpus)):
        if count is not None and count < 1:
            raise UserError(option, count, "there must be at least one", f"e.g. {option} 8")
    if options.method is not None and options.method not in METHODS:
        close_matches = difflib.get_close_matches(options.method, METHODS, n=1)
        raise UserError(
            "--method",
            options.method,
            "is not known",
            f"use {close_matches[0] if close_matches else ', '.join(METHODS)}",
        )
    if write is not None and write.exists():
        problem = "is a folder" if write.is_dir() else "is there already"
        raise UserError("--write", str(write), problem, "name a file that is not there yet, e.g. planned.yaml")
    for option, path in (("--write", write), ("--html", html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            problem = "is a folder" if path.is_dir() else "its folder is not there"
            raise UserError(option, str(path), problem, "name a file in a folder that exists")
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise UserError(option, str(path), "its folder cannot be written", "choose another")


def _as_written(loaded: LoadedRun, cluster: Cluster, say: Callable[[str], None]) -> Estimate | str:
    """Returns the estimate of the run as written, or why it cannot run on this cluster."""
    say("rehearsing the run as it is written")
    try:
        if loaded.run.left_open:
            return "left to the planner"
        device = "cpu" if cluster.device.kind == "cpu" else "cuda"
        run = loaded.run.model_copy(update={"device": device, "ranks": "auto"})
        target = aim(replace(loaded, run=run), cluster.nodes, cluster.per_node)
        return estimate(target.source, target.run, cluster)
    except UserError as error:
        return str(error)


def _written_line(written: Estimate | str) -> str:
    if isinstance(written, str):
        return written
    missing = human(max(-written.spare, written.host - written.cluster.host_memory))
    return headline(written) + ("" if written.fits else f": does not fit, {missing} are missing")


def _cluster(options: PlanOptions) -> Cluster:
    memory = None if options.memory is None else int(options.memory * 1e9)
    if options.gpu is None:
        local = this_machine()
        if local.device.kind == "cpu" and (options.nodes > 1 or options.gpus):
            raise UserError(
                "--gpu", None, "which GPU is meant is not known here", "add e.g. --gpu h100 or --gpu rtx-4090"
            )
        if options.nodes == 1 and not options.gpus:
            return local
        return cluster_of(local.device.name, options.nodes, options.gpus, options.network, options.price, memory)
    gpus = options.gpus or (1 if options.nodes == 1 else None)
    return cluster_of(options.gpu, options.nodes, gpus, options.network, options.price, memory)


def _loaded(options: PlanOptions) -> tuple[LoadedRun, bool]:
    """Returns the run, and whether it comes from a file; a bare model name gets a default run."""
    path = Path(options.what)
    if path.suffix in (".yaml", ".yml"):
        return load_run(path, options.overrides), True
    return load_run({"model": {"name": options.what}, "data": {"train": "data.jsonl"}}, options.overrides), False


def _methods(options: PlanOptions, values: dict[str, Any], is_file: bool) -> list[str | None]:
    if options.method is not None:
        return [options.method]
    full_only = "method" in values or "fp8" in values  # fp8 is for what is trained whole
    return [None] if is_file or full_only else [None, *ADAPTERS]


def _resolved(values: dict[str, Any], method: str | None, cluster: Cluster) -> tuple[Run, ModelSource]:
    """Returns the run resolved for this cluster, before any strategy; a bare model name gets common sizes."""
    values = json.loads(json.dumps(values, default=str))
    if method is not None:
        values["method"] = {"type": method}
    source = find_config(Model.model_validate(values["model"]), task_wanted(Run.model_validate(values)))
    data = values.setdefault("data", {})
    train = values.setdefault("train", {})
    text = source.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or LENGTH
    limit = 512 if source.config.is_encoder_decoder else limit
    data.setdefault("sequence_length", min(LENGTH, limit))
    train.setdefault("batch_size", max(32, 2 * cluster.ranks))
    train["micro_batch_size"] = 1
    train.setdefault("steps", 1000)
    train.pop("epochs", None)
    values.pop("parallel", None)
    values.pop("ranks", None)
    values["device"] = "cpu" if cluster.device.kind == "cpu" else "cuda"
    run = Run.model_validate(values)
    peak = cluster.device.peak
    machine = Machine(0 if run.device == "cpu" else cluster.per_node, "bf16" in peak, "fp8" in peak, cluster.ranks)
    batch = run.train.batch_size  # strategies with few data ranks may divide one that all ranks together cannot
    divided = run.train.model_copy(update={"batch_size": cluster.ranks})
    result = resolve_machine(run.model_copy(update={"train": divided}), machine)
    resolve_objective(result, source.task)
    resolve_model(result, source.config)
    source = settle_attention(result, source, lambda _: None)
    final = result.run.model_copy(update={"compile": run.compile})  # a strategy decides what is left open
    return final.model_copy(update={"train": final.train.model_copy(update={"batch_size": batch})}), source


def _tokens(text: str | None) -> float | None:
    if text is None:
        return None
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    try:
        count = float(text[:-1]) * scale[text[-1].lower()] if text[-1].lower() in scale else float(parse_number(text))
        if not (math.isfinite(count) and count > 0):
            raise ValueError
        return count
    except (ValueError, IndexError):
        raise UserError("--tokens", text, "is no number of tokens", "write e.g. 500M or 15T") from None


def show(plan: Plan, console: Console, tokens: float | None, short: bool = False) -> None:
    """Prints a plan: headline, reasons, table and rules of thumb."""
    cluster = plan.cluster
    run = plan.run
    sizes = plan.quick.of.sizes if plan.quick is not None else None
    count = f"{(sizes.block * sizes.layers + sizes.rest) / 1e9:.2f}B parameters" if sizes else ""
    console.print(
        f"\n[bold]{plan.source.label}[/bold] ({count}), {run.method.type}, on [bold]{cluster.label}[/bold]: "
        f"{run.train.batch_size} sequences of {run.data.sequence_length:,} tokens a step, {run.computes_in}"
    )
    if plan.best is None or short:
        for line in (
            reasons(plan) if plan.best is None else [f"{describe(plan.best.strategy)}: {headline(plan.best.estimate)}"]
        ):
            console.print(f"  {line}")
        return
    console.print(f"[bold green]{describe(plan.best.strategy)}[/bold green]: {headline(plan.best.estimate)}")
    if tokens:
        console.print(f"  {_total_line(plan, tokens)}")
    console.print()
    for line in reasons(plan):
        console.print(f"  • {line}")
    console.print(_table(plan, tokens))
    for rule, observed, agrees in guidelines(plan):
        console.print(f"  [{'green' if agrees else 'yellow'}]{'✓' if agrees else '≠'}[/] {rule}: {observed}")
    console.print(
        f"  [dim]{plan.considered:,} strategies looked at, "
        f"{len(plan.options) + len(plan.too_large)} of them rehearsed in part; ≈ is a rough score; tokens/s per device;"
        " again: what is computed twice; waits: share of the step[/dim]"
    )


def _total_line(plan: Plan, tokens: float) -> str:
    assert plan.best is not None
    best = plan.best.estimate
    hours = best.hours(tokens)
    cost = best.cost(tokens)
    price = f", {money(cost)} USD at {plan.cluster.price:g} per device and hour" if cost is not None else ""
    return f"{tokens:,.0f} tokens take {long_time(hours)}{price}"


def _table(plan: Plan, tokens: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    titles = ["strategy", "micro", "again", "step", "tokens/s", "MFU", "memory", "waits"]
    titles += ["USD"] if tokens and plan.cluster.price is not None else []
    for title in titles:
        table.add_column(
            title, justify="left" if title in ("strategy", "again") else "right", no_wrap=title != "strategy"
        )
    for option in (*plan.options, *plan.too_large):
        strategy = option.strategy
        estimate = option.estimate
        waits = estimate.time.data_axis + estimate.time.model_axes + estimate.time.bubble + estimate.time.offload
        size = human(estimate.peak) if estimate.fits else f"[red]✗ {human(estimate.peak)}[/red]"
        row = [
            strategy.name(),
            str(strategy.micro),
            "full" if strategy.recompute else "none",
            f"{estimate.time.seconds:.2f} s",
            f"{estimate.rate:,.0f}",
            f"{estimate.mfu:.0%}",
            size,
            f"{waits / estimate.time.seconds:.0%}",
        ]
        if tokens and (cost := estimate.cost(tokens)) is not None:
            row.append(money(cost))
        table.add_row(*row)
    quick = plan.quick
    assert quick is not None
    for strategy in plan.rough:
        step_seconds = plan.scale[0] * quick.seconds(strategy)
        size = human(plan.scale[1] * quick.memory(strategy))
        rate = plan.run.train.batch_size * plan.run.data.sequence_length / step_seconds / plan.cluster.ranks
        recompute_mode = "full" if strategy.recompute else "none"
        row = [
            strategy.name(),
            str(strategy.micro),
            recompute_mode,
            f"≈ {step_seconds:.2f} s",
            f"≈ {rate:,.0f}",
            "",
            f"≈ {size}",
            "",
        ]
        table.add_row(*row, style="dim")
    return table


def run_yaml(plan: Plan, values: dict[str, Any], is_file: bool) -> str:
    """Returns a RUN.yaml with the best strategy; settings of the user's own file are preserved."""
    assert plan.best is not None
    document: dict[str, Any] = json.loads(json.dumps(values, default=str))
    if not is_file:
        document["model"] = hub_name(plan.source.label)
        document["data"] |= {"sequence_length": plan.run.data.sequence_length}
    elif list(document.get("model", {})) == ["name"]:
        document["model"] = document["model"]["name"]
    if plan.run.method.type != "full" and "method" not in values:
        document["method"] = plan.run.method.type
    document.setdefault("train", {})["batch_size"] = plan.run.train.batch_size
    for name in ("parallel", "offload", "recompute", "ranks"):
        document.pop(name, None)
    for path, value in plan.best.strategy.settings().items():
        place(document, path, value)
    comments = "\n".join(f"# {line}" for line in [headline(plan.best.estimate), *reasons(plan)])
    cluster = plan.cluster
    head = f"# Planned for {cluster.nodes} × {cluster.per_node} × {cluster.device.name}."
    return f"{head}\n{comments}\n{yaml.safe_dump(as_written(document), sort_keys=False, allow_unicode=True, width=120)}"
