"""`shardwise verify`: makes the run small, computes the reference, tries claim after claim, and certifies."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.config.load import LoadedRun, load_run
from shardwise.config.methods import Full, Lora, Qlora
from shardwise.config.resolve import Resolution, purpose_of, resolve_objective, task_wanted
from shardwise.config.schema import Run
from shardwise.errors import Interrupted, RunFailed, UserError
from shardwise.launch.cpu import cpu_env, free_memory
from shardwise.models.adapt import adapt_model
from shardwise.models.source import ModelSource, find_model
from shardwise.models.tasks import CLASSES
from shardwise.train.job import Job, prepare_job
from shardwise.verify.certificate import FAIL, OPEN, PASS, Certificate, Row
from shardwise.verify.claims import BATCH, MODEL, PACKING, ROWS, Claim, Plan, plan_claims
from shardwise.verify.compare import together
from shardwise.verify.sized import Room, Sized, drops_out, make_model, write_adapter

HOST = [sys.executable, "-m", "shardwise.verify.host"]
TOKENS = {"cpu": 1 << 14, "cuda": 1 << 18}  # of a proof's batch; longer sequences are cut
SHARE = 0.6  # of the free memory
TIMEOUT = 300.0  # seconds that ranks wait for each other
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PLAIN_TASKS = ("causal", "seq2seq", "masked", "classify")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line asks for besides the run."""

    full: bool = False
    layers: int | None = None
    own_precision: bool = False
    keep: Path | None = None  # where the ranks' logs stay


def verify(
    run_file: str | Path | dict[str, Any],
    overrides: list[str] | tuple[str, ...] = (),
    options: Options | None = None,
    say: Say = lambda _: None,
    shown: Callable[[Row], None] = lambda _: None,
) -> Certificate:
    """Tries every claim of a run; raises UserError where the run itself is a mistake."""
    options = options or Options()
    loaded = load_run(run_file, overrides)
    name = "the given run" if isinstance(run_file, dict) else Path(run_file).name
    folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
    try:
        return _verify(loaded.run, name, options, folder, say, shown)
    finally:
        if options.keep is not None:
            shutil.copytree(folder / "claims", options.keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _verify(run: Run, name: str, options: Options, folder: Path, say: Say, shown: Callable[[Row], None]) -> Certificate:
    say("finding the model")
    result = Resolution(run)
    source = find_model(run.model, say, task_wanted(run))
    resolve_objective(result, source.task)
    source = adapt_model(result, source, source.load_tokenizer())
    run = result.run
    device = _device(run)
    precision = _precision(run, device) if options.own_precision else "fp32"
    plan = plan_claims(run, run.data.packing, precision)
    notes = list(plan.notes)
    length = min(run.data.sequence_length, max(64, TOKENS[device] // plan.rows))
    room = Room(device, int(SHARE * _memory(device)), plan.ranks, plan.rows * length * 2 * (len(plan.claims) + 2))
    stages = 2 * (run.parallel.chunks or 2 if run.parallel.schedule in ("interleaved", "zbv") else 1)
    say("making the model of the proof")
    layers_needed = stages if run.parallel.pipeline > 1 else 1
    sized = make_model(source, folder / "model", room, options.layers, options.full, layers_needed)
    if drops_out(source.config):
        notes.append("dropout is off: it draws other numbers in other shapes")
    base = _base(run, sized, source, plan, precision, device, length, folder, notes)
    *others, last = plan.claims
    if any(_changed(base, last.settings) == _changed(base, claim.settings) for claim in others):
        plan.claims = others  # all of it is what one of the others shows
    prover = _Prover(base, source, plan, sized, folder, say)
    prover.prepare()
    certificate = Certificate(
        name, sized.told, sized.parameters, prover.batch_told, prover.reference_told, precision, device,
        notes + prover.notes,
    )  # fmt: skip
    with _host(precision, device, folder) as host:
        prover.compute_reference(host)
        for claim in plan.claims:
            row = prover.show(claim, host, certificate.rows)
            certificate.rows.append(row)
            shown(row)
    return certificate


def _device(run: Run) -> str:
    gpu = torch.cuda.is_available()
    if run.device == "cuda" and not gpu:
        raise UserError("device", "cuda", "no CUDA device is visible here", "add device=cpu to prove it on the CPU")
    return "cuda" if gpu and run.device != "cpu" else "cpu"


def _precision(run: Run, device: str) -> str:
    if run.precision != "auto":
        return run.precision
    return "fp32" if device == "cpu" else "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _memory(device: str) -> int:
    if device == "cpu":
        return free_memory()
    return int(torch.cuda.mem_get_info()[0])


def _base(
    run: Run, sized: Sized, source: ModelSource, plan: Plan, precision: str, device: str, length: int, folder: Path,
    notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    """The plain settings that every claim changes: the user's run on one rank, without anything that needs proof."""
    values = run.model_dump(mode="json")
    values["model"] = {
        "name": str(sized.folder), "tokenizer": source.tokenizer, "trust_remote_code": source.trust_remote_code,
    }  # fmt: skip
    for section in ("parallel", "offload", "checkpoint", "export", "log"):
        values.pop(section)
    values |= {
        "precision": precision, "device": device, "recompute": "none", "compile": False, "resume": "never",
        "timeout": min(run.timeout, TIMEOUT), "backend": "auto", "checkpoint": {"every": None},
        "offload": {"disk": None}, "parallel": {},
    }  # fmt: skip
    values["train"] |= {
        "steps": 2, "epochs": None, "batch_size": plan.rows, "schedule": "constant", "warmup": 0, "eval_every": None,
        "stop_early": None, "in_backward": False,
    }  # fmt: skip
    if isinstance(run.method, Lora):
        values["method"] |= {"dropout": 0.0}
    if length < run.data.sequence_length:
        values["data"] |= {"sequence_length": length, "over_length": "truncate"}
        notes.append(f"sequences of {run.data.sequence_length} tokens are cut to {length}")
    return values


def _changed(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The run with values at dotted paths."""
    made: dict[str, Any] = json.loads(json.dumps(values))
    for path, value in settings.items():
        *parents, leaf = path.split(".")
        place = made
        for part in parents:
            place = place[part]
        place[leaf] = value
    return made


class _Prover:
    """Prepares the documents, asks the reference, and tries claims."""

    def __init__(
        self, base: dict[str, Any], source: ModelSource, plan: Plan, sized: Sized, folder: Path, say: Say
    ) -> None:
        self.base, self.source, self.plan, self.sized, self.folder, self.say = base, source, plan, sized, folder, say
        self.notes: list[str] = []
        self.plain = False
        self.adapter: Path | None = None
        self.scales: dict[str, float] = {}
        self.together = 0  # documents that share a row
        self.batch_told, self.reference_told = "", ""
        self._jobs: dict[str, Job] = {}

    def prepare(self) -> None:
        """The documents of the proof's batch, as plain lists of ids, and an adapter that has values everywhere."""
        first = self.plan.claims[0]
        self.say("reading the data")
        job = self._job(first.settings)
        self._begin_adapter(job)
        run = job.run
        task = run.objective.type  # type: ignore[union-attr]
        self.plain = task in PLAIN_TASKS and (isinstance(run.method, Full) or self.adapter is not None)
        job = self._job(first.settings)
        packed = any(claim.name == PACKING for claim in self.plan.claims)
        batches = {
            BATCH: self._job({k: v for k, v in first.settings.items() if k != "data.packing"}) if packed else job
        }
        batches |= {ROWS: job} if packed else {}
        for name, each in batches.items():
            torch.save(_documents(each, self.plan.rows), self.folder / f"{name}.pt")
        self._jobs = batches
        sequences = batches[BATCH].loader().sequences(0, self.plan.rows)
        documents, tokens = sum(map(len, sequences)), sum(int(s["length"].sum()) for s in sequences)
        self.together = sum(len(s) for s in sequences if len(s) > 1)
        how = f"{documents} documents in {len(sequences)} packed rows" if packed else f"{documents} documents"
        self.batch_told = f"{how}, {tokens:,} tokens of the run's own data"
        self.reference_told = "one document at a time, transformers' forward, summed loss / count, torch's AdamW, fp32"
        if not self.plain:
            what = task if task not in PLAIN_TASKS else run.method.type
            self.reference_told = f"one rank of Shardwise, undivided ({what} has no plain counterpart)"
        elif run.train.optimizer != "adamw" or run.train.optimizer_state != "fp32":
            self.notes.append(
                f"losses and gradients are compared; {run.train.optimizer}'s update has no plain counterpart"
            )

    def _job(self, settings: dict[str, Any]) -> Job:
        values = _changed(self.base, settings) | {"output": str(self.folder / "prepare")}
        launched = {
            name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in os.environ
        }
        try:
            return prepare_job(LoadedRun(Run.model_validate(values)), self.say)
        finally:
            os.environ.update(launched)

    def _begin_adapter(self, job: Job) -> None:
        """Gives a plain LoRA run an adapter to start from, which the reference reads too."""
        method, plan = job.run.method, job.adapted.plan
        if not isinstance(method, Lora) or isinstance(method, Qlora) or plan is None or plan.dora or plan.whole:
            return
        from shardwise.adapters.layers import features
        from shardwise.adapters.peft import peft_config
        from shardwise.models.build import build_on_meta

        model = build_on_meta(job.source)
        shapes = {name: features(model.get_submodule(name)) for name in plan.targets}
        self.adapter = self.folder / "adapter"
        config = peft_config(model, plan, str(self.sized.folder), job.source.task, None)
        write_adapter(self.adapter, config, shapes, plan.ranks)
        self.scales = {name: plan.scale(name) for name in plan.targets}
        self.base["method"]["adapter"] = str(self.adapter)

    def compute_reference(self, host: _Host) -> None:
        """Leaves the reference's answers in the folder."""
        for name, job in self._jobs.items():
            self.say(f"computing the reference ({name})" if len(self._jobs) > 1 else "computing the reference")
            if self.plain:
                work = self._plain_work(name, job)
            elif name == ROWS:
                continue  # packed or not, there is but one to ask
            else:
                settings = {"ranks": 1, "parallel.zero": 0, "train.micro_batch_size": self.plan.rows}
                work = self._work("own", settings) | {"against": None, "answer": str(self._answer(name))}
            found = host.ask(work | {"folder": str(self.folder / "claims" / f"reference-{name}"), "ranks": 1})
            if "failed" in found[0]:
                if found[0]["kind"] == "user":
                    raise _AlreadyWorded(found[0]["failed"])
                raise RunFailed(f"the reference failed: {found[0]['failed']}\n  → --keep FOLDER keeps its log")

    def _plain_work(self, name: str, job: Job) -> dict[str, Any]:
        run, source = job.run, job.source
        train = run.train
        return {
            "kind": "plain", "model": str(self.sized.folder), "auto_class": CLASSES[source.task][0],
            "trust_remote_code": source.trust_remote_code, "task": source.task, "device": run.device,
            "documents": str(self.folder / f"{name}.pt"), "answer": str(self._answer(name)),
            "trained": _trained(job), "adapter": str(self.adapter) if self.adapter else None, "scales": self.scales,
            "learning_rate": train.learning_rate, "betas": train.betas, "eps": train.eps, "clip": train.clip,
            "weight_decay": train.weight_decay, "decay_norms": train.decay_norms,
            "steps_like_ours": train.optimizer == "adamw" and train.optimizer_state == "fp32",
        }  # fmt: skip

    def _answer(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _work(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        values = _changed(self.base, settings) | {"output": str(self.folder / "runs" / name)}
        if values["device"] == "cuda" and int(values["ranks"]) > torch.cuda.device_count():
            values["backend"] = "gloo"  # ranks that share a card
        return {"kind": "claim", "run": values}

    def show(self, claim: Claim, host: _Host, rows: list[Row]) -> Row:
        """Tries a claim, unless there is nothing to try."""
        failed = {row.claim.name for row in rows if row.verdict != PASS}
        if broken := next((name for name in claim.rests_on if name in failed), None):
            return Row(claim, OPEN, why=f"it rests on: {broken}")
        if not self.plain and claim.name in (MODEL, PACKING):
            return Row(claim, OPEN, why="the reference does this itself")
        if claim.name == PACKING and not self.together:
            return Row(claim, OPEN, why="no row of the batch holds two documents: a longer data.sequence_length would")
        self.say(f"{claim.name}: {claim.what}")
        folder = self.folder / "claims" / _file_name(claim.name)
        work = self._work(_file_name(claim.name), claim.settings)
        work |= {"against": str(self._answer(claim.batch)), "bounds": asdict(claim.bounds), "ranks": claim.ranks}
        folder.mkdir(parents=True)
        meeting = {"device": work["run"]["device"], "timeout": work["run"]["timeout"]}
        meeting["backend"] = "nccl" if meeting["device"] == "cuda" and work["run"]["backend"] == "auto" else "gloo"
        (folder / "meet.json").write_text(json.dumps(meeting))
        began = time.monotonic()
        found = host.ask(work | {"folder": str(folder)})
        seconds = time.monotonic() - began
        if any("failed" in one for one in found):
            order = {"user": 0, "bug": 1, "lost": 2}
            rank, told = min(((r, o) for r, o in enumerate(found) if "failed" in o), key=lambda x: order[x[1]["kind"]])
            said = told["failed"] if told["kind"] == "user" else f"rank {rank} failed: {told['failed']}"
            return Row(claim, FAIL, why=said, seconds=seconds)
        names = json.loads(self._answer(claim.batch).with_suffix(".json").read_text())["names"]
        difference = together(found, names)
        trouble = difference.trouble(claim.bounds)
        return Row(claim, FAIL if trouble else PASS, difference, trouble, seconds, tuple(found[0]["notes"]))


class _AlreadyWorded(UserError):
    """A user's mistake that a rank found: its message is complete."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _trained(job: Job) -> list[str]:
    from shardwise.adapters.apply import apply_method
    from shardwise.models.build import build_on_meta

    model = build_on_meta(job.source)
    apply_method(model, job.run, job.source.weights)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _documents(job: Job, rows: int) -> list[dict[str, torch.Tensor]]:
    """The documents of the first batch one by one, read from the store; which are in it is the loader's to say."""
    loader, purpose = job.loader(), purpose_of(job.run)
    found: list[dict[str, torch.Tensor]] = []
    for sequence in loader.sequences(0, rows):
        for place in sequence:
            ids, learned = (torch.as_tensor(part) for part in loader.document(place))
            ids, learned = ids.long(), learned.bool()
            if purpose == "causal":
                found.append({"ids": ids, "learned": learned})
            elif purpose == "seq2seq":
                found.append({"ids": ids[~learned], "labels": ids[learned]})
            elif purpose in ("masked", "classify"):
                # Which tokens are hidden is drawn by the layout, and a class is its last token: one row of it.
                row = loader.collate([sequence])
                types = {} if row.token_type_ids is None else {"types": row.token_type_ids[0]}
                found.append({"ids": row.input_ids[0], "labels": row.labels[0], **types})
    return found


class _Host:
    """The process that ranks are forked from, and all of its descendants: one group, ended together."""

    def __init__(self, environment: dict[str, str], model: Path) -> None:
        self._process = subprocess.Popen(
            [*HOST, str(os.getpid()), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def ask(self, work: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank found."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        while not select.select([process.stdout], [], [], 0.2)[0]:
            pass
        line = process.stdout.readline()
        if not line:
            words = process.stderr.read().decode(errors="replace").strip().splitlines() or ["no words"]
            raise RunFailed(f"the process of the ranks ended: {words[-1]}")
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def end(self) -> None:
        """Leaves no process behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _host(precision: str, device: str, folder: Path) -> Iterator[_Host]:
    environment = dict(os.environ) | {"TOKENIZERS_PARALLELISM": "false", "SHARDWISE_PROGRESS": "off"}
    for name in LAUNCHED:
        environment.pop(name, None)
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""} | cpu_env(precision)
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    (folder / "claims").mkdir(exist_ok=True)
    host = _Host(environment, folder / "model")
    previous: Any = None
    with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
        previous = signal.signal(signal.SIGTERM, _stop)
    try:
        yield host
    finally:
        host.end()
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def _stop(number: int, frame: Any) -> None:
    raise Interrupted("stopped: nothing was certified", 128 + number)
