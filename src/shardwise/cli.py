"""The command line. Imports are inside the commands: `shardwise --help` must not wait for torch."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.errors import Interrupted, RunFailed, UserError

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Trains and fine-tunes any Hugging Face model, from one laptop or GPU to a cluster.",
    epilog="Begin with [bold]shardwise demo[/bold], or write a RUN.yaml and run [bold]shardwise train RUN.yaml[/bold].",
)

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
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 -m shardwise train run.yaml",
))  # fmt: skip
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the plan.")] = False,
) -> None:
    """Train: plans, starts the ranks, watches them, and hands over a Hugging Face folder.

    Run it again to go on from the last checkpoint.
    """
    from shardwise.train.describe import print_account, print_plan, print_result
    from shardwise.trainer import Trainer

    main_rank = int(os.environ.get("RANK", 0)) == 0
    loud = main_rank and not quiet
    say = _say if loud else (lambda _: None)
    trainer = Trainer(run_file, *(overrides or ()))
    job = trainer.prepare(say)
    if loud:
        print_account(trainer.loaded.account, job.run)
        print_plan(job)
    result = trainer.fit(say)
    if main_rank:
        print_result(result, job)


@app.command(epilog=_examples(
    "shardwise config run.yaml",
    "shardwise config run.yaml train.epochs=3 --json",
    "shardwise config --schema > shardwise.schema.json   # completion and checks in your editor",
    "shardwise config --from-deepspeed ds_config.json ranks=8   # the equivalent RUN.yaml",
))  # fmt: skip
def config(
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="The description of the run.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved run as JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of RUN.yaml.")] = False,
    from_deepspeed: Annotated[
        Path | None, typer.Option(metavar="CONFIG.json", help="Print a DeepSpeed config as the equivalent RUN.yaml.")
    ] = None,
) -> None:
    """Show the resolved run: every value, and where it came from."""
    from shardwise.config.load import load_run
    from shardwise.config.schema import Run

    if schema:
        print(json.dumps(Run.model_json_schema(), indent=1))
        return
    if from_deepspeed is not None:
        from shardwise.config.load import from_deepspeed as equivalent

        if run_file is not None and "=" in run_file.name and not run_file.exists():  # no RUN.yaml, but an override
            run_file, overrides = None, [str(run_file), *(overrides or ())]
        print(equivalent(from_deepspeed, run_file, overrides or ()), end="")
        return
    if run_file is None:
        raise UserError("RUN.yaml", None, "is needed unless --schema is given", "shardwise config RUN.yaml")
    from shardwise.config.resolve import resolve_machine

    loaded = load_run(run_file, overrides or ())
    result = resolve_machine(loaded.run)
    if as_json:
        print(result.run.model_dump_json(indent=1))
        return
    from shardwise.train.describe import print_config

    print_config(result, loaded)


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
    from shardwise.data.command import show_data

    loaded = load_run(run_file, overrides or ())
    raise typer.Exit(show_data(loaded.run, run_file.name, rows, row or [], html, as_json))


@app.command(epilog=_examples(
    "shardwise export out/run my-model",
    "shardwise export out/run/checkpoints/step-00000200 my-model --dtype bf16 --shard-size 2GiB",
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
    gguf: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Write a GGUF file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0."),
    ] = None,
    check: Annotated[
        bool | None, typer.Option(help="Compare with the trained model; default: where it fits in memory.")
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the hub.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the hub's repository private.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder or a GGUF file, compared with the trained model, with a card."""
    from shardwise.checkpoint.hf import DTYPES, find_checkpoint
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
    wanted: Check = "auto" if check is None else check
    if gguf is not None:
        if dtype != "auto":
            raise UserError("--dtype", dtype, "is for Hugging Face folders", f"leave it out: --gguf {gguf} is the type")
        done = export_gguf(checkpoint, target, gguf, overwrite, _say, changed_tokenizer, wanted)
    else:
        found = find_checkpoint(Path(checkpoint).expanduser())
        _say(f"exporting {found}")
        done = export_folder(
            found, target, dtype, size, overwrite, _say, changed_tokenizer=changed_tokenizer, check=wanted
        )
    _say(done.checked or "not checked")
    print(f"the model lies in {target}")
    if push is not None:
        print(f"pushed to {push_to_hub(hub, done.path, push, private, done.card)}")


@app.command(epilog=_examples(
    "shardwise chat out/run",
    'shardwise chat my-model --prompt "What does ZeRO stage 3 shard?"',
    "shardwise chat smollm2-135m-instruct --temperature 0.7 --seed 1",
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
    changed_tokenizer: Annotated[
        bool, typer.Option("--changed-tokenizer", help="Go on if tokenizer or chat template changed since training.")
    ] = False,
) -> None:
    """Talk to a model in the terminal: /help shows the commands."""
    from rich.console import Console

    from shardwise.models.inference import load_for_inference
    from shardwise.serve.chat import chat as run_chat
    from shardwise.serve.generate import Sampling

    loaded, tokenizer = load_for_inference(model, changed_tokenizer)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    run_chat(loaded, tokenizer, sampling, system, prompt, Console(), model)


@app.command(epilog=_examples("shardwise doctor", "shardwise doctor --json"))
def doctor(as_json: Annotated[bool, typer.Option("--json", help="For other tools.")] = False) -> None:
    """Show what this machine has, what will not work, and how to mend it."""
    from shardwise.doctor import main as diagnose

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


def _has_the_word(error: Exception) -> bool:
    """Whether this process is the one to print a failure: under torchrun all ranks of a host mostly meet the same one.

    The first rank speaks. torchrun ends all as soon as one has left, so the others wait for the first to speak and for
    their own end. A rank that is still there after that met a failure of its own.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        return True
    time.sleep(FIRST_WORD)
    return not isinstance(error, Interrupted)


def main(argv: list[str] | None = None) -> Any:
    """The `shardwise` command: one message and an exit code for every failure a user can meet."""
    try:
        app(args=argv, standalone_mode=True)
    except (UserError, RunFailed, Interrupted) as error:
        if _has_the_word(error):
            label = "" if isinstance(error, Interrupted) else "error: "
            print(f"{label}{error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted before training began; nothing was written", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left: so do we
        sys.exit(141)
