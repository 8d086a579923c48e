"""The command line. Imports are inside the commands: `shardwise --help` must not wait for torch."""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from shardwise.cli.renamed import RenamedCommand
from shardwise.core.errors import Interrupted, RunFailed, UserError, apart

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Trains and fine-tunes any Hugging Face model, from one laptop or GPU to a cluster.",
    epilog="Begin with [bold]shardwise demo[/bold], or write a RUN.yaml and run [bold]shardwise train RUN.yaml[/bold].",
)

GRACE = "How long ranks may take to save when they must stop, e.g. 90s or 10min."
FIRST_WORD = 5.0  # seconds that the other ranks of a host leave the first to report a failure they share

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The description of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]…", help="Settings that override the file.")
]


def _examples(*lines: str) -> str:
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  [cyan]{line}[/cyan]" for line in lines)


@app.command(epilog=_examples(
    "shardwise train run.yaml",
    "shardwise train run.yaml ranks=2 parallel.zero=3 train.learning_rate=1e-4",
    "shardwise train run.yaml resume=never output=out/second",
    "shardwise train run.yaml --profile 10   # where the time of step 10 goes, and what to change",
    "shardwise train run.yaml --watch   # a dashboard in the browser beside it",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 -m shardwise train run.yaml",
))  # fmt: skip
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the plan.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start it even if it is not foreseen to fit.")] = False,
    profile: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Take these steps under torch's profiler, e.g. 10,500.")
    ] = None,
    watched: Annotated[
        bool, typer.Option("--watch", help="Show it in the browser: prints the address of a dashboard.")
    ] = False,
) -> None:
    """Train: plans, starts the ranks, watches them, and hands over a Hugging Face folder.

    Run it again to go on from the last checkpoint.
    """
    from shardwise.launch.trainer import Trainer
    from shardwise.train.describe import print_account, print_plan, print_result

    main_rank = int(os.environ.get("RANK", 0)) == 0
    if watched:
        from shardwise.watch.command import need_server

        need_server()
    loud = main_rank and not quiet
    say = _say if loud else (lambda _: None)
    profile_override = [f"advanced.log.profile=[{profile}]"] if profile else []
    trainer = Trainer(run_file, *(overrides or ()), *profile_override, force=force)
    resolved = trainer.prepare(say)
    if loud:
        print_account(trainer.loaded.account, resolved.run)
        print_plan(resolved)
    with _dashboard(resolved.output if watched and main_rank else None):
        result = trainer.fit(say)
    if main_rank:
        print_result(result, resolved)


def _dashboard(output: Path | None) -> AbstractContextManager[None]:
    """The dashboard of a run beside it, where it is wanted."""
    if output is None:
        return nullcontext()
    from shardwise.watch.command import beside

    return beside(output, _say)


@app.command(epilog=_examples(
    "shardwise watch out/run",
    "shardwise watch out   # every run below it, to compare",
    "shardwise watch out/run --terminal",
    "shardwise watch out/run --html run.html   # a page to pass on",
    "shardwise watch out --host 0.0.0.0   # prints an address with a token",
    "curl http://127.0.0.1:8765/metrics   # for Prometheus",
))  # fmt: skip
def watch(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]…", help="A run's output folder, or one that holds several; default: here."),
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw in this terminal instead.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as one page that needs no server, and leave.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; elsewhere than here needs a token.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: 8765, or a free one where that is taken.")
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the token; default: made where one is needed."),
    ] = None,
) -> None:
    """Watch runs live: curves, speed, memory, ranks, checkpoints, logs and samples, in the browser or the terminal.

    Reads what runs write; nothing of theirs is changed, and they need not be told.
    """
    from shardwise.watch.command import WatchOptions
    from shardwise.watch.command import watch as show

    if terminal and html is not None:
        raise UserError("--terminal", None, "does not go with --html", "leave one of them out")
    show(WatchOptions(folders or [Path()], host, port, token_env, terminal, html))


@app.command(epilog=_examples(
    "shardwise launch run.yaml --slurm --hosts 4 --gpus 8 --time 12h --partition train",
    "shardwise launch run.yaml --slurm --hosts 6:8 --gpus 8 --dry-run > job.sh   # to read, or to change",
    "shardwise launch run.yaml --ssh node-1,node-2 train.epochs=3   # or a file with one host per line",
    "shardwise launch run.yaml --k8s --hosts 2 --gpus 8 --image registry/shardwise:1 --volume outputs:/outputs",
    "shardwise launch run.yaml --ray --hosts 2:4 --address http://head:8265",
    "shardwise launch run.yaml --sky --hosts 2 --gpus 8 --gpu H100",
    "shardwise launch --status slurm:1234",
    "shardwise launch --cancel slurm:1234",
))  # fmt: skip
def launch(
    context: typer.Context,
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="The description of the run.")] = None,
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="As a Slurm job.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="As a job of a Ray cluster.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="As an Indexed Job of Kubernetes, by kubectl.")] = False,
    sky: Annotated[bool, typer.Option("--sky", help="As a SkyPilot task.")] = False,
    ssh: Annotated[str | None, typer.Option(metavar="HOSTS", help="By ssh, on a,b,c or those of a file.")] = None,
    hosts: Annotated[str, typer.Option(metavar="N[:M]", help="2:4 = at least 2, at most 4; default 1.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")] = False,
    follow: Annotated[bool, typer.Option(help="Show its log until it ends.")] = True,
    cancel: Annotated[str | None, typer.Option(metavar="ID", help="End a launched run; it saves first.")] = None,
    status: Annotated[str | None, typer.Option(metavar="ID", help="Show how a launched run stands.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Of each host.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Which, as the cluster calls it: SkyPilot needs it.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Of each host; default: its GPUs.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Of each host.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each host, as the scheduler writes it (64G, 64Gi).")] = None,
    time_: Annotated[str | None, typer.Option("--time", help="Longest time, e.g. 12h; it saves before.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition; the namespace of Kubernetes.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account; Kubernetes' service account.")] = None,
    image: Annotated[str | None, typer.Option(help="Container with shardwise in it.")] = None,
    volume: Annotated[str | None, typer.Option(metavar="CLAIM:PATH", help="Kubernetes: where the output goes.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="NAME alone is not written down. Repeatable.")
    ] = None,
    line: Annotated[
        list[str] | None, typer.Option(help="Of the script, before the start; #SBATCH … too. Repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The job's name; default: the output folder's.")] = None,
    address: Annotated[str | None, typer.Option(help="Of Ray's dashboard; for ssh: the rendezvous host.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Rendezvous port.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Failures in a row, without a checkpoint between them.")] = 3,
    grace: Annotated[str, typer.Option(metavar="TIME", help=GRACE)] = "5min",
) -> None:
    """Launch a run on several hosts: Slurm, ssh, Ray, Kubernetes or SkyPilot start `shardwise node` on each.

    Hosts may come and go between the least and the most; docs/launch.md tells how.
    """
    from shardwise.launch import command
    from shardwise.launch.submission import parse_seconds

    if status is not None:
        command.check_alone("--status", _given_options(context, "status", "address"))
        print(command.status(status, address))
        return
    if cancel is not None:
        command.check_alone("--cancel", _given_options(context, "cancel", "address"))
        print(command.cancel(cancel, address))
        return
    if run_file is None:
        raise UserError("RUN.yaml", None, "is needed", "shardwise launch RUN.yaml --slurm --hosts 2")
    launcher = command.LauncherOptions(slurm, ray, k8s, sky, ssh).chosen()
    command.check_options(launcher, context.params | {"time": time_})
    submission = command.prepare(
        run_file, overrides or [], hosts, ssh, env=env or [], time=time_, name=name, gpus=gpus, gpu=gpu, ranks=ranks,
        cpus=cpus, memory=memory, partition=partition, account=account, image=image, volume=volume,
        lines=tuple(line or ()), address=address, port=port, restarts=restarts,
        grace=math.ceil(parse_seconds("--grace", grace, 1)),
    )  # fmt: skip
    raise typer.Exit(command.launch(launcher, submission, dry_run, follow))


def _given_options(context: typer.Context, *excluded: str) -> list[str]:
    """Options and arguments given on the command line, except `excluded`."""
    names = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in excluded:
            names.append(parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.metavar))
    return names


@app.command(cls=RenamedCommand, epilog=_examples(
    "shardwise node run.yaml --hosts 2 --rendezvous node-1:29400   # the same on both hosts",
    "shardwise node run.yaml --hosts 6:8 --rendezvous node-1:29400 --restarts 10 train.batch_size=1680",
))  # fmt: skip
def node(
    run_file: RunFile,
    overrides: Overrides = None,
    hosts: Annotated[str, typer.Option(metavar="N[:M]", help="Hosts to train on; 2:4 = at least 2, at most 4.")] = "1",
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Rendezvous endpoint: one of the hosts, with a free port.")
    ] = "127.0.0.1:29400",
    ranks: Annotated[int | None, typer.Option(min=1, help="Of this host; default: the run's, or one per GPU.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Failures in a row, without a checkpoint between them.")] = 3,
    grace: Annotated[str, typer.Option(metavar="TIME", help=GRACE)] = "5min",
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="Silence after which a host counts as lost, e.g. 15s; at least 3s.")
    ] = "15s",
    last_call: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --hosts N:M, how long to wait for more than N; default 5s.")
    ] = None,
    wait: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait for enough hosts, e.g. 30s, 10min or 2h.")
    ] = "30min",
    name: Annotated[str | None, typer.Option(help="This host's name in logs.")] = None,
    id_: Annotated[
        str | None, typer.Option("--id", help="Run id: separates runs that share a rendezvous endpoint.")
    ] = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="SIGTERM takes this host out, and the others go on; default: all end.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Holds the hosts' token; else SHARDWISE_MEETING_TOKEN does.")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", hidden=True, help="Standard input is a launcher's.")] = False,
) -> None:
    """Run this host's part of a run on several hosts; start it on each of them, or let `shardwise launch` do so.

    Hosts may be lost, cut off and come back: the others go on from the last checkpoint, with whoever is there. Hosts
    that share a token admit nobody else: `shardwise launch` makes one, by hand set it on all of them.
    """
    from shardwise.launch.node import NodeOptions, run_node
    from shardwise.launch.submission import parse_seconds

    options = NodeOptions(
        hosts, rendezvous, ranks, restarts,
        parse_seconds("--grace", grace, 1), parse_seconds("--patience", patience, 3),
        None if last_call is None else parse_seconds("--last-call", last_call), parse_seconds("--wait", wait, 1),
        name, id_, listen, withdraw, token_file,
    )  # fmt: skip
    raise typer.Exit(run_node(run_file, overrides or [], options))


@app.command(epilog=_examples(
    "shardwise config run.yaml",
    "shardwise config run.yaml train.epochs=3 --json",
    "shardwise config --schema > shardwise.schema.json   # completion and checks in your editor",
    "shardwise config --from-deepspeed ds_config.json ranks=8   # the equivalent RUN.yaml",
    "shardwise config --combinations   # what goes with what, and why not",
))  # fmt: skip
def config(
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="The description of the run.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved run as JSON.")] = False,
    advanced: Annotated[
        bool, typer.Option("--advanced", help="Show all of the section advanced, not only what is set.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of RUN.yaml.")] = False,
    from_deepspeed: Annotated[
        Path | None, typer.Option(metavar="CONFIG.json", help="Print a DeepSpeed config as the equivalent RUN.yaml.")
    ] = None,
    combinations: Annotated[
        bool, typer.Option("--combinations", help="Print which features combine, and why others do not.")
    ] = False,
) -> None:
    """Show the resolved run: every value, and where it came from."""
    from shardwise.config.advanced import as_written
    from shardwise.config.json_schema import json_schema
    from shardwise.config.load import load_run

    if combinations:
        _print_combinations(as_json)
        return
    if schema:
        print(json.dumps(json_schema(), indent=1))
        return
    if from_deepspeed is not None:
        from shardwise.config.load import from_deepspeed as equivalent

        if run_file is not None and "=" in run_file.name and not run_file.exists():  # no RUN.yaml, but an override
            run_file, overrides = None, [str(run_file), *(overrides or ())]
        print(equivalent(from_deepspeed, run_file, overrides or ()), end="")
        return
    if run_file is None:
        raise UserError(
            "RUN.yaml", None, "is needed unless --schema or --combinations is given", "shardwise config RUN.yaml"
        )
    from shardwise.config.resolve import resolve_machine

    loaded = load_run(run_file, overrides or ())
    result = resolve_machine(loaded.run)
    if as_json:
        loaded.print_notes()
        print(json.dumps(as_written(result.run.model_dump(mode="json")), indent=1, ensure_ascii=False))
        return
    from shardwise.train.describe import print_config

    print_config(result, loaded, advanced)


def _print_combinations(machine: bool) -> None:
    from shardwise.config.combinations import RULES
    from shardwise.config.combinations.page import LEGEND, as_json, generic_reason, matrix, sides

    if machine:
        print(json.dumps(as_json(), indent=1, ensure_ascii=False))
        return
    print(f"{matrix()}\n\n{LEGEND}\n")
    for rule in RULES:
        sign = {"refused": "x", "remark": "o"}[rule.verdict]
        print(f"{sign} {'  +  '.join(sides(rule))}\n    {generic_reason(rule)}\n    → {rule.remedy}")


@app.command(epilog=_examples(
    "shardwise data run.yaml",
    "shardwise data run.yaml --rows 5 --html data.html   # a page to pass round",
    "shardwise data run.yaml --row chat.jsonl:17   # one row, token by token",
    "shardwise data run.yaml data.sequence_length=4096 data.over_length=drop --rows 0",
    "shardwise data run.yaml --json | jq '.train[].learned_share'",
))  # fmt: skip
def data(
    run_file: RunFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Examples to show of each source, evenly spread.")] = 2,
    row: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE:LINE", help="Show this row instead; or SOURCE:NUMBER, or NUMBER. Can be repeated."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all of it as one page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the bill as JSON and nothing else.")] = False,
) -> None:
    """Show what a run would learn from: the bill of each source, what is left out, and real examples with their masks.

    Nothing is trained. Leaves with 2 if the data would fail the run.
    """
    from shardwise.config.load import load_run
    from shardwise.foresight.data_report.command import print_failure, show_data

    try:
        loaded = load_run(run_file, overrides or ())
    except UserError as error:
        if as_json:
            print_failure(apart(error))
        raise
    loaded.print_notes()
    raise typer.Exit(show_data(loaded.run, run_file.name, rows, row or [], html, as_json))


@app.command(epilog=_examples(
    "shardwise export out/run my-model",
    "shardwise export out/run/checkpoints/step-00000200 my-model --dtype bf16 --shard-size 2GiB",
    "shardwise export out/lora my-model --merged",
    "shardwise export out/run my-model.gguf --gguf q8_0",
    "shardwise export out/run my-model --push owner/name --private",
))  # fmt: skip
def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's output folder (newest checkpoint) or a checkpoint; for --gguf also a model."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The Hugging Face folder to write, or the .gguf file.")],
    dtype: Annotated[str, typer.Option(help="auto (as the original weights), bf16, fp16 or fp32.")] = "auto",
    shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "4GiB",
    overwrite: Annotated[bool, typer.Option(help="Replace the target if it exists.")] = False,
    changed_tokenizer: Annotated[
        bool, typer.Option("--changed-tokenizer", help="Go on if the tokenizer changed.")
    ] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Of an adapter run: base and adapter as one model.")] = False,
    gguf: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Write a GGUF file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0."),
    ] = None,
    check: Annotated[
        bool | None, typer.Option(help="Compare with the trained model; default: where it fits in memory.")
    ] = None,
    allow_missing_tensors: Annotated[
        bool,
        typer.Option("--allow-missing-tensors", help="Export without the source's untouched tensors if it is gone."),
    ] = False,
    allow_unreadable: Annotated[
        bool, typer.Option("--allow-unreadable", help="With --gguf: write files that no reader reads as the model.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model brings, to export and check it.")
    ] = False,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the hub.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the hub's repository private.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder or a GGUF file, compared with the trained model, with a card.

    Of an adapter run it is the adapter, as PEFT writes it.
    """
    from shardwise.checkpoint.hf import DTYPES, ExportOptions, find_checkpoint
    from shardwise.config.units import parse_size
    from shardwise.export.command import Check, export_folder, export_gguf
    from shardwise.export.hub import check_hub
    from shardwise.export.hub import push as push_to_hub

    if dtype != "auto" and dtype not in DTYPES:
        raise UserError("--dtype", dtype, "is not known", f"use auto, {', '.join(DTYPES)}")
    try:
        size = parse_size(shard_size)
        if size < 1:
            raise ValueError("must be above 0")
    except ValueError as error:
        raise UserError("--shard-size", shard_size, str(error), "write e.g. 4GiB") from None
    if private and push is None:
        raise UserError("--private", None, "has no effect without --push", "add --push owner/name, or leave it out")
    hub = check_hub(push) if push is not None else None
    if gguf is None and target.suffix == ".gguf":
        problem = "is the name of a GGUF file, but a Hugging Face folder would be written"
        raise UserError("target", str(target), problem, "add --gguf with a type, e.g. --gguf q8_0, or name a folder")
    check_mode: Check = "auto" if check is None else check
    if gguf is not None:
        if dtype != "auto":
            raise UserError("--dtype", dtype, "is for Hugging Face folders", f"leave it out: --gguf {gguf} is the type")
        if allow_missing_tensors:
            problem = "is for Hugging Face folders: a GGUF file never has such tensors"
            raise UserError("--allow-missing-tensors", True, problem, "leave it out")
        options = ExportOptions(overwrite=overwrite, changed_tokenizer=changed_tokenizer, trust=trust_remote_code)
        done = export_gguf(checkpoint, target, gguf, options, _say, check_mode, allow_unreadable)
    else:
        if allow_unreadable:
            raise UserError("--allow-unreadable", True, "is for GGUF files", "add --gguf with a type, or leave it out")
        source = find_checkpoint(Path(checkpoint).expanduser())
        _say(f"exporting {source}")
        options = ExportOptions(
            dtype,
            size,
            overwrite,
            changed_tokenizer=changed_tokenizer,
            merged=merged,
            allow_missing=allow_missing_tensors,
            trust=trust_remote_code,
        )
        done = export_folder(source, target, options, _say, check_mode)
    for line in (done.checked or "not checked").splitlines():
        _say(line)
    print(f"the model lies in {target}")
    if push is not None:
        print(f"pushed to {push_to_hub(hub, done.path, push, private, done.card)}")


@app.command(epilog=_examples(
    "shardwise chat out/run",
    'shardwise chat my-model --prompt "What does ZeRO stage 3 shard?"',
    "shardwise chat smollm2-135m-instruct --temperature 0.7 --seed 1",
    "shardwise chat out/run --compare smollm2-135m-instruct",
    "cat questions.txt | shardwise chat out/run",
))  # fmt: skip
def chat(
    model: Annotated[
        str, typer.Argument(help="An exported folder, a run's output folder, a checkpoint, or a model name.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask once, print the answer and leave.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model that answers the same questions.")
    ] = None,
    changed_tokenizer: Annotated[
        bool, typer.Option("--changed-tokenizer", help="Go on if tokenizer or chat template changed since training.")
    ] = False,
) -> None:
    """Talk to a model in the terminal: /help shows the commands."""
    from rich.console import Console

    from shardwise.export.inference import load_for_inference
    from shardwise.nn.generate import Sampling
    from shardwise.serve.chat import Conversation
    from shardwise.serve.chat import chat as run_chat

    def load(name: str) -> tuple[Any, Any]:
        return load_for_inference(name, changed_tokenizer)

    loaded, tokenizer = load(model)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    conversation = Conversation(loaded, tokenizer, sampling, system)
    run_chat(conversation, prompt, Console(), model, load, compare)


@app.command(epilog=_examples(
    "shardwise serve out/run",
    "shardwise serve base=smollm2-135m-instruct tuned=out/run --port 8080",
    "MY_KEY=… shardwise serve out/run --host 0.0.0.0 --api-key-env MY_KEY --rate 60/min",
))  # fmt: skip
def serve(
    model: Annotated[list[str], typer.Argument(metavar="[NAME=]MODEL…", help="What `chat` takes, one or several.")],
    host: Annotated[str, typer.Option(help="Address to listen at; elsewhere than here needs a key or --open.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the key that clients must send.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer a request may ask for.")] = 4096,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Answers computed at once; others wait.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Answers that may wait; beyond that, 503.")] = 256,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a request may take, waiting included.")] = 600,
    rate: Annotated[str | None, typer.Option(metavar="N/min", help="Requests per client; beyond that, 429.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in requests; default: its folder's.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Listen elsewhere than here without a key.")] = False,
    engine: Annotated[str, typer.Option(help="auto (vLLM if installed and a GPU), vllm or transformers.")] = "auto",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    changed_tokenizer: Annotated[
        bool, typer.Option("--changed-tokenizer", help="Go on if tokenizer or chat template changed since training.")
    ] = False,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API: /v1/chat/completions, /v1/completions, /v1/models."""
    from shardwise.serve.command import ServeOptions
    from shardwise.serve.command import serve as run_server

    run_server(ServeOptions(
        model, host, port, api_key_env, max_tokens, max_concurrent, queue, timeout, rate, name, open_, engine,
        log_prompts, changed_tokenizer,
    ))  # fmt: skip


@app.command("meet", cls=RenamedCommand, hidden=True)
@app.command("diloco-server", cls=RenamedCommand, epilog=_examples(
    "shardwise diloco-server   # on loopback; in each worker's RUN.yaml: diloco: 127.0.0.1:29400",
    "shardwise diloco-server --dtype int8 --wait 5min --min-workers 2   # a slow link, slow workers",
    "shardwise diloco-server --method fedavg --state out/clinics   # workers are weighted by their tokens",
    "MY_TOKEN=… shardwise diloco-server --host 0.0.0.0 --token-env MY_TOKEN",
))  # fmt: skip
def diloco_server(
    host: Annotated[str, typer.Option(help="Address to listen at; elsewhere than here needs a token or --open.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 29400,
    state: Annotated[Path, typer.Option(metavar="FOLDER", help="State; a restart resumes from it.")] = Path(
        "out/diloco"
    ),
    method: Annotated[str, typer.Option(help="diloco (nesterov, 0.7, 0.9) or fedavg (sgd, 1, 0, by tokens).")] = (
        "diloco"
    ),
    outer_optimizer: Annotated[str | None, typer.Option(help="The outer optimizer: nesterov or sgd.")] = None,
    outer_lr: Annotated[float | None, typer.Option(help="Its learning rate.")] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="Its momentum.")] = None,
    weight: Annotated[str | None, typer.Option(help="How workers count in the mean: equal or tokens.")] = None,
    dtype: Annotated[str, typer.Option(help="On the wire, both ways: fp32, bf16, int8, int4 or int2.")] = "fp32",
    wait: Annotated[str, typer.Option(help="How long a round waits for the others after the first came.")] = "60s",
    min_workers: Annotated[int, typer.Option(min=1, help="A round waits for at least so many workers.")] = 1,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token that workers must show.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Listen elsewhere than here without a token.")] = False,
) -> None:
    """Run the sync server of DiLoCo or FedAvg workers: runs with `diloco:` in their RUN.yaml.

    It holds the global parameters and no data. It can be killed and restarted at any time: it resumes.
    """
    from shardwise.diloco.command import SyncServerOptions
    from shardwise.diloco.command import meet as run_server

    run_server(SyncServerOptions(
        host, port, state, method, outer_optimizer, outer_lr, outer_momentum, weight, dtype, wait, min_workers,
        token_env, open_,
    ))  # fmt: skip


@app.command("eval", epilog=_examples(
    "shardwise eval out/run   # what the run held out",
    "shardwise eval smollm2-135m-instruct out/run --data heldout.jsonl   # side by side",
    "shardwise eval out/run --choice mmlu.csv --shots 5 --examples dev.csv --score letter --output out/eval",
    "shardwise eval out/run --generate sums.jsonl --scorer numeric --json",
    "shardwise eval A B --judge mt.jsonl --judge-url http://127.0.0.1:8000/v1 --judge-model big --output out/mt",
    "shardwise eval A B C --tasks eval.yaml",
))  # fmt: skip
def evaluate(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="As for chat; several are compared.")],
    tasks: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Tasks with all their settings.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Loss and perplexity on this file. Can be repeated.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="Multiple choice from this file.")] = None,
    score: Annotated[str, typer.Option(help="Of choices: byte, raw, token or letter.")] = "byte",
    shots: Annotated[int, typer.Option(min=0, help="Worked examples before each choice question.")] = 0,
    examples: Annotated[str | None, typer.Option(help="The file they are from.")] = None,
    generate: Annotated[list[str] | None, typer.Option(help="Answers to the prompts of this file, scored.")] = None,
    scorer: Annotated[str, typer.Option(help="exact, contains, regex, json or numeric.")] = "exact",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer (generate, judge).")] = None,
    lm_eval: Annotated[list[str] | None, typer.Option(metavar="TASK", help="A task of lm-eval.")] = None,
    lm_eval_folder: Annotated[str | None, typer.Option(help="Folder of lm-eval task files of your own.")] = None,
    judge: Annotated[str | None, typer.Option(help="Questions whose answers another model judges.")] = None,
    judge_url: Annotated[str | None, typer.Option(help="Its OpenAI-compatible endpoint.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="Its name there.")] = None,
    judge_mode: Annotated[str, typer.Option(help="single (grades) or pairwise (against the first model).")] = "single",
    judge_key: Annotated[str, typer.Option(metavar="VARIABLE", help="Holds the key.")] = "OPENAI_API_KEY",
    limit: Annotated[int | None, typer.Option(min=1, help="First so many rows of each file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for results.json and samples.jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
    changed_tokenizer: Annotated[
        bool, typer.Option("--changed-tokenizer", help="Go on if tokenizer or chat template changed since training.")
    ] = False,
) -> None:
    """Measure models: losses, multiple choice, scored answers, lm-eval's tasks, a judge; several side by side.

    Without options: what the run that made the model held out.
    """
    from shardwise.evaluate.command import evaluate as measure
    from shardwise.evaluate.options import tasks_from

    todo = tasks_from(context.params)
    measure(models, todo, output, as_json, changed_tokenizer)


@app.command(epilog=_examples(
    "shardwise verify run.yaml",
    "shardwise verify run.yaml parallel.zero=3 ranks=4 --output certificate.json",
    "shardwise verify run.yaml device=cpu   # a run meant for a cluster, proven on a laptop",
    "shardwise verify run.yaml --precision   # in the run's own precision, with wider bounds",
    "shardwise verify run.yaml --json | jq '.claims[] | [.claim, .verdict]'",
))  # fmt: skip
def verify(
    run_file: RunFile,
    overrides: Overrides = None,
    full: Annotated[bool, typer.Option("--full", help="The whole model instead of a few of its layers.")] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers to keep; default: each kind of them, 2.")] = None,
    precision: Annotated[
        bool, typer.Option("--precision", help="The run's own precision, with wider bounds; default: fp32.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate as JSON.")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the ranks' logs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON and nothing else.")] = False,
) -> None:
    """Prove that packing, accumulation, ZeRO, offload, recomputation and parallel axes change nothing.

    Your model, made small, and your data: each claim against one plain process that takes a document at a time. Leaves
    with 1 if a claim fails.
    """
    from shardwise.foresight.verify.certificate import check_target
    from shardwise.foresight.verify.show import show

    if output is not None:
        check_target(output)
    raise typer.Exit(show(run_file, overrides or [], full, layers, precision, output, keep, as_json))


@app.command(epilog=_examples(
    "shardwise plan llama-3.1-8b --gpu rtx-4090",
    "shardwise plan llama-3.1-405b --gpu h100 --nodes 128 --gpus 8 data.sequence_length=8192 --tokens 1T",
    "shardwise plan run.yaml --gpu a100 --gpus 8 --network ethernet-25g --html plan.html",
    "shardwise plan qwen3-30b-a3b --gpu h200 --gpus 8 --write run.yaml",
    "shardwise plan --roles smollm2-135m-instruct",
))  # fmt: skip
def plan(
    what: Annotated[
        str | None, typer.Argument(metavar="RUN.yaml|MODEL", help="A run, or a model by name, folder or hub id.")
    ] = None,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(help="Devices of each node; default: one, or a node's usual number.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Which device, e.g. h100, rtx-4090; default: this machine's.")] = None,
    network: Annotated[str | None, typer.Option(help="Between nodes, e.g. ib-400, ethernet-100g.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="GB", help="Of each device, if not the usual.")] = None,
    price: Annotated[float | None, typer.Option(help="USD per device and hour.")] = None,
    tokens: Annotated[str | None, typer.Option(help="To train on, e.g. 500M or 15T: for time and cost.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora, qlora, …; default: the run's, or what fits.")] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Look closely at three times as many.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="RUN.yaml", help="Write the run that does it.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report to pass round.")] = None,
    roles: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Instead, show what each part of this model is, and how it is cut."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Plan: what fits a cluster, how long it takes, what it costs, and why; without the cluster, weights or data.

    Leaves with 1 if nothing fits.
    """
    if roles is not None:
        from shardwise.parallel.tensor.describe import show_roles

        show_roles(roles, as_json)
        return
    if what is None:
        raise UserError("RUN.yaml|MODEL", None, "is needed", "e.g. shardwise plan llama-3.1-8b --gpu h100 --gpus 8")
    import gc

    gc.disable()  # a second of the imports
    try:
        from shardwise.foresight.plan.command import PlanOptions, run_plan

        options = PlanOptions(what, overrides or [], nodes, gpus, gpu, network, price, memory, tokens, method, thorough)
        raise typer.Exit(run_plan(options, write, html, as_json))
    finally:
        gc.enable()


@app.command(epilog=_examples(
    "shardwise rehearse run.yaml --nodes 64 --gpus 8",
    "shardwise rehearse run.yaml --nodes 2 --gpus 8 parallel.tensor=8 parallel.zero=3",
    "shardwise rehearse run.yaml --gpus 4 --rank 3 --json",
))  # fmt: skip
def rehearse(
    run_file: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each node (processes, with device: cpu).")] = 1,
    rank: Annotated[
        int | None, typer.Option(help="Rehearse this rank; default: one of each kind (first, middle, last stage).")
    ] = None,
    documents: Annotated[int, typer.Option(help="Documents in each packed row.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Rehearse: the real set-up and one real step of a rank of any world, without its hardware, memory or data.

    Tells its memory by category, every collective with its bytes, and whatever error would have come up.
    """
    from shardwise.foresight.rehearse.command import run_rehearsal

    run_rehearsal(run_file, overrides or [], nodes, gpus, rank, documents, as_json)


@app.command(epilog=_examples(
    "shardwise zoo llama gpt2 mixtral",
    "shardwise zoo --axis tensor --task masked",
    "shardwise zoo --keep zoo.json --write docs/architectures.md   # all of them: an hour or more",
))  # fmt: skip
def zoo(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL_TYPE]…", help="As transformers calls them.")
    ] = None,
    axis: Annotated[list[str] | None, typer.Option(help="tensor, pipeline, context or expert; default: all.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="causal, masked or seq2seq; default: all.")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="FILE", help="Results so far: go on from them.")] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
) -> None:
    """Try the architectures of the installed transformers along each axis, tiny and on two ranks, against one process.

    Leaves with 1 if one of them is wrong rather than right or refused.
    """
    from shardwise.foresight.zoo.run import AXES
    from shardwise.foresight.zoo.table import TASKS, as_markdown, run_zoo, summary

    results = run_zoo(names or (), axis or tuple(AXES), task or TASKS, keep)
    if write is not None:
        write.write_text(as_markdown(results, "shardwise zoo --write docs/architectures.md"))
    for result in results:
        if names or result.outcome == "wrong":
            print(f"{result.axis:9} {result.task:8} {result.model_type:24} {result.outcome:8} {result.why}")
    for line in summary(results):
        print(line)
    raise typer.Exit(any(result.outcome == "wrong" for result in results))


bench_app = typer.Typer(rich_markup_mode="rich")
app.add_typer(bench_app, name="bench")


@bench_app.callback(invoke_without_command=True, epilog=_examples(
    "shardwise bench",
    "shardwise bench train run.yaml   # a run's own speed, and what would help",
    "shardwise bench --quick --only matmul,attention",
    "shardwise bench --only disk --folder /mnt/scratch",
    "shardwise bench --ranks 2 --json",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 -m shardwise bench",
))  # fmt: skip
def bench(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="Where disk speed is measured.")] = Path("."),
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Processes here for the network part; default: one per GPU.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="matmul, stream, attention, launch, host-link, disk, adam, network; several by commas."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of a minute or two; less exact.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For other tools, with every single measurement.")] = False,
) -> None:
    """Measure this machine: matmuls, memory, attention, launches, host link, disk, AdamW on the host, the network.

    The planner then uses these figures in place of its table. Under torchrun: also between nodes.
    """
    if context.invoked_subcommand is not None:
        return
    from shardwise.foresight.bench.command import bench as measure

    measure(folder, ranks, only or [], quick, as_json)


@bench_app.command("train", epilog=_examples(
    "shardwise bench train run.yaml",
    "shardwise bench train run.yaml compile=true train.micro_batch_size=4",
    "shardwise bench train run.yaml ranks=2 parallel.zero=3 --steps 20 --json",
    "shardwise bench train run.yaml --nodes 16 --gpus 8   # this GPU as rank 0 of 128: kernels, host, memory",
))  # fmt: skip
def bench_train(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed, after three to warm up.")] = 10,
    documents: Annotated[int, typer.Option(min=1, help="Documents in each packed row.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    trace: Annotated[Path | None, typer.Option(help="A folder for each rank's trace (JSON) of one step.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Take one rank's part of a run on so many nodes; see --gpus.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs (or CPU processes) per node of that run; only one need be here.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which rank of it; the first of the last stage is slowest.")] = 0,
) -> None:
    """A run's tokens/s and MFU on this machine, what its step is made of, and what would make it faster.

    Takes steps of the run's own code on its own model with random values: neither weights nor data are read. With
    --nodes or --gpus, one rank of a larger run on one device: its collectives return at once.
    """
    from shardwise.foresight.bench.train import run_bench

    world = None if nodes is None and gpus is None else (nodes or 1, gpus or 1, rank)
    if world is None and rank:
        raise UserError("--rank", rank, "is one of a larger run's", "add e.g. --nodes 2 --gpus 8")
    run_bench(run_file, overrides or [], steps, documents, as_json, trace, world)


@app.command(epilog=_examples("shardwise doctor", "shardwise doctor --json"))
def doctor(as_json: Annotated[bool, typer.Option("--json", help="For other tools.")] = False) -> None:
    """Show what this machine has, what will not work, and how to mend it."""
    from shardwise.cli.doctor import main as diagnose

    raise typer.Exit(diagnose(as_json))


@app.command(epilog=_examples(
    "shardwise demo",
    "shardwise demo --write run.yaml   # the demo's RUN.yaml, to start your own from",
))  # fmt: skip
def demo(
    output: Annotated[Path, typer.Option(help="Where the model goes.")] = Path("out/demo"),
    write: Annotated[Path | None, typer.Option(help="Only write a RUN.yaml to start from.")] = None,
    seconds: Annotated[
        int, typer.Option(min=20, help="Training time to aim for; fewer pairs on a slow machine.")
    ] = 120,
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Teach SmolLM2-135M-Instruct some facts about distributed training, and see it answer before and after."""
    from shardwise.demo.play import play, write_example

    if write is not None:
        write_example(write)
        return
    play(output, seconds, ranks)


@app.command(epilog=_examples(
    "shardwise recipes",
    "shardwise recipes qlora   # those whose name or purpose has the word",
    "shardwise recipes llama-3.1-8b-lora-24gb run.yaml   # copy one",
))  # fmt: skip
def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, or a word to look for.")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="[RUN.yaml]", help="File or folder to copy it to.")] = None,
) -> None:
    """List ready-made runs, show one, or copy it to start from."""
    from shardwise.recipes import copy_recipe, recipe
    from shardwise.recipes import recipes as all_recipes

    known = all_recipes()
    if name is not None and target is not None:
        written = copy_recipe(name, target)
        print(f"{written}: point data at your own files, then run `shardwise train {written}`")
        return
    matches = {n: about for n, about in known.items() if name is None or name.lower() in f"{n} {about}".lower()}
    if name is not None and (name in known or not matches):
        print(recipe(name), end="")
        return
    width = max(map(len, matches))
    for name_of_recipe, about in matches.items():
        print(f"{name_of_recipe:{width}}  {about}")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def deepspeed(context: typer.Context) -> None:
    """Start a script written for DeepSpeed, with its launcher's options; --help shows them."""
    from shardwise.deepspeed.launch import run

    raise typer.Exit(run(context.args))


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def _version(value: bool) -> None:
    if value:
        from shardwise import __version__

        print(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _should_report(error: Exception) -> bool:
    """Whether this process prints a failure: under torchrun all ranks of a host mostly have the same one.

    The first rank prints it. torchrun ends all ranks as soon as one has exited, so the others wait for the first to
    print and for their own end. A rank that is still alive after that has a failure of its own.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        return True
    time.sleep(FIRST_WORD)
    return not isinstance(error, Interrupted)


def main(argv: list[str] | None = None) -> Any:
    """The `shardwise` command: prints one message and exits with a code for every failure a user can meet."""
    interrupts = _CtrlC((argv or sys.argv[1:])[:1] == ["train"])
    try:
        with interrupts:
            app(args=argv, standalone_mode=True)
    except (UserError, RunFailed, Interrupted) as error:
        if _should_report(error):
            label = "" if isinstance(error, Interrupted) else "error: "
            for failure in apart(error) if isinstance(error, UserError) else [error]:
                print(f"{label}{failure}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left: so do we
        sys.exit(141)
    except BaseException as error:
        if not interrupts.recent or (isinstance(error, SystemExit) and error.code != 130):
            raise
        with suppress(BaseException):
            atexit._run_exitfuncs()
        interrupts.exit_now()


class _CtrlC:
    """Ends an import at once, and remembers when it was heard elsewhere: what comes of it is no KeyboardInterrupt.

    In the middle of an import that would be raised in native code too, which then aborts; Python 3.11 makes a
    RuntimeError of it within a class, and a package that imports parts of itself on demand goes round in circles.
    typer makes an exit of it.
    """

    LATELY = 5.0  # seconds

    def __init__(self, training: bool) -> None:
        self._words = f"interrupted{' before training began; nothing was written' * training}"
        self._at = -math.inf
        self._before = signal.getsignal(signal.SIGINT)

    def exit_now(self) -> NoReturn:
        """Not by the interpreter's own way out.

        Half-imported modules would complain on it, and where the interrupt met code that was made from a string
        (dataclasses are) Python ends itself by SIGINT.
        """
        print(self._words, file=sys.stderr, flush=True)
        os._exit(130)

    @property
    def recent(self) -> bool:
        return time.monotonic() - self._at < self.LATELY

    def __enter__(self) -> None:
        if self._before is signal.default_int_handler:
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, self._on_sigint)

    def __exit__(self, *error: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_sigint:
            signal.signal(signal.SIGINT, self._before)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self._at = time.monotonic()
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                self.exit_now()
            frame = frame.f_back
        raise KeyboardInterrupt
