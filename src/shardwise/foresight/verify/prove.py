"""Prepares the data of a verification, computes the reference, and tries claims."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.config.axes import check_model_axes
from shardwise.config.load import LoadedRun
from shardwise.config.methods import Full, Lora, Qlora
from shardwise.config.paths import place
from shardwise.config.resolve import purpose_of
from shardwise.config.schema import Run
from shardwise.core.errors import RunFailed, UserError, WordedUserError
from shardwise.foresight.prepare import prepare_run
from shardwise.foresight.verify.certificate import FAIL, OPEN, PASS, UNTRIED, ClaimRow
from shardwise.foresight.verify.claims import BATCH, MODEL, PACKING, ROWS, Claim, ClaimPlan
from shardwise.foresight.verify.compare import HALF, TIMES, Reference, rounding, wider, worst_difference
from shardwise.foresight.verify.ranks import Ranks, first_failure, unlaunched
from shardwise.foresight.verify.shrunk_model import ShrunkModel, write_adapter
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.tasks import CLASSES
from shardwise.resolved_run import ResolvedRun

PLAIN_TASKS = ("causal", "seq2seq", "masked", "classify")

Say = Callable[[str], None]


def as_run(base: dict[str, Any], claim: Claim) -> Run:
    """Returns the run that shows a claim."""
    return Run.model_validate(changed(base, claim.settings))


def changed(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the run's values with settings at dotted paths."""
    result: dict[str, Any] = json.loads(json.dumps(values))
    for path, value in settings.items():
        place(result, path, value)
    return result


class Prover:
    """Prepares documents, computes the reference, and tries claims."""

    def __init__(
        self, base: dict[str, Any], source: ModelSource, plan: ClaimPlan, sized: ShrunkModel, folder: Path, say: Say
    ) -> None:
        self.base = base
        self.source = source
        self.plan = plan
        self.sized = sized
        self.folder = folder
        self.say = say
        self.notes: list[str] = []
        self.plain = False
        self.adapter: Path | None = None
        self.scales: dict[str, float] = {}
        self.packed_documents = 0  # documents that share a row
        self.batch_description = ""
        self.reference_description = ""
        self._jobs: dict[str, ResolvedRun] = {}

    def prepare(self) -> None:
        """Saves the documents of the batch as plain lists of ids, and an adapter with non-zero values."""
        first = self.plan.claims[0]
        self.say("reading the data")
        job = self._job(first.settings)
        self._begin_adapter(job)
        run = job.run
        task = run.objective.type  # type: ignore[union-attr]
        self.plain = task in PLAIN_TASKS and (isinstance(run.method, Full) or self.adapter is not None)
        if task != "causal" and (run.router.aux_loss or run.router.z_loss):
            self.plain = False  # the reference knows the routers of causal models alone
        job = self._job(first.settings)
        packed = any(claim.name == PACKING for claim in self.plan.claims)
        batches = {
            BATCH: self._job({k: v for k, v in first.settings.items() if k != "data.packing"}) if packed else job
        }
        batches |= {ROWS: job} if packed else {}
        for name, batch_job in batches.items():
            torch.save(_documents(batch_job, self.plan.rows), self.folder / f"{name}.pt")
        self._jobs = batches
        sequences = batches[BATCH].loader().sequences(0, self.plan.rows)
        documents = sum(map(len, sequences))
        tokens = sum(int(s["length"].sum()) for s in sequences)
        self.packed_documents = sum(len(s) for s in sequences if len(s) > 1)
        layout = f"{documents} documents in {len(sequences)} packed rows" if packed else f"{documents} documents"
        self.batch_description = f"{layout}, {tokens:,} tokens of the run's own data"
        self.reference_description = (
            "one document at a time, transformers' forward, summed loss / count, torch's AdamW, fp32"
        )
        if not self.plain:
            unsupported = task if task not in PLAIN_TASKS else run.method.type
            self.reference_description = f"one rank of Shardwise, undivided ({unsupported} has no plain counterpart)"
        elif run.train.optimizer != "adamw" or run.train.optimizer_state != "fp32":
            self.notes.append(
                f"losses and gradients are compared; {run.train.optimizer}'s update has no plain counterpart"
            )

    def _job(self, settings: dict[str, Any]) -> ResolvedRun:
        values = changed(self.base, settings) | {"output": str(self.folder / "prepare")}
        with unlaunched():
            return prepare_run(LoadedRun(Run.model_validate(values)))

    def _begin_adapter(self, job: ResolvedRun) -> None:
        """Gives a plain LoRA run an initial adapter, which the reference reads too."""
        method = job.run.method
        plan = job.adapted.plan
        if not isinstance(method, Lora) or isinstance(method, Qlora) or plan is None or plan.dora or plan.fully_trained:
            return
        from shardwise.nn.adapters.layers import features
        from shardwise.nn.adapters.peft import peft_config
        from shardwise.nn.models.build import build_on_meta

        model = build_on_meta(job.source)
        shapes = {name: features(model.get_submodule(name)) for name in plan.targets}
        self.adapter = self.folder / "adapter"
        config = peft_config(model, plan, str(self.sized.folder), job.source.task, None)
        write_adapter(self.adapter, config, shapes, plan.ranks)
        self.scales = {name: plan.scale(name) for name in plan.targets}
        self.base["method"]["adapter"] = str(self.adapter)

    def compute_reference(self, ranks: Ranks) -> None:
        """Writes the reference's results to the folder."""
        notes: list[str] = []
        for name, job in self._jobs.items():
            self.say(f"computing the reference ({name})" if len(self._jobs) > 1 else "computing the reference")
            if self.plain:
                work = self._plain_work(name, job)
            elif name == ROWS:
                continue  # packed or not, there is but one to ask
            else:
                settings = {"ranks": 1, "parallel.zero": 0, "train.micro_batch_size": self.plan.rows}
                work = self._work("own", settings) | {"against": None, "answer": str(self._answer(name))}
            self._ask_reference(work, f"reference-{name}", ranks)
            if self.plain and job.run.precision != "fp32":
                notes += self._allow_rounding(work, name, ranks)
        self.notes += notes[:1]  # another batch says about the same

    def _ask_reference(self, work: dict[str, Any], log: str, ranks: Ranks) -> None:
        results = ranks.ask(work | {"folder": str(self.folder / "claims" / log), "ranks": 1})
        if "failed" in results[0]:
            if results[0]["kind"] == "user":
                raise WordedUserError(results[0]["failed"])
            raise RunFailed(f"the reference failed: {results[0]['failed']}\n  → --keep FOLDER keeps its log")

    def _allow_rounding(self, work: dict[str, Any], name: str, ranks: Ranks) -> list[str]:
        """Measures the effect of half precision on the reference, and widens the bounds of claims on this batch.

        Returns a note if the effect is larger than usual.
        """
        file = self.folder / f"{name}-half.safetensors"
        precision = self.base["precision"]
        self._ask_reference(work | {"precision": precision, "answer": str(file)}, f"half-{name}", ranks)
        bounds = rounding(Reference(file), Reference(self._answer(name)))
        self.plan.claims = [
            replace(claim, bounds=wider(claim.bounds, bounds)) if claim.batch == name else claim
            for claim in self.plan.claims
        ]
        if bounds.gradient <= HALF.gradient and bounds.loss <= HALF.loss and bounds.after <= HALF.after:
            return []
        return [
            f"{precision} alone moves this model's loss by {bounds.loss / TIMES:.1e} and its gradients by "
            f"{bounds.gradient / TIMES:.1e}: bounds are {TIMES:.0f} times that; without --precision they are narrow"
        ]

    def _plain_work(self, name: str, job: ResolvedRun) -> dict[str, Any]:
        run = job.run
        source = job.source
        train = run.train
        return {
            "kind": "plain", "model": str(self.sized.folder), "auto_class": CLASSES[source.task][0],
            "trust_remote_code": source.trust_remote_code, "task": source.task, "device": run.device,
            "precision": "fp32", "documents": str(self.folder / f"{name}.pt"), "answer": str(self._answer(name)),
            "trained": _trained(job), "adapter": str(self.adapter) if self.adapter else None, "scales": self.scales,
            "learning_rate": train.learning_rate, "betas": train.betas, "eps": train.eps, "clip": train.max_grad_norm,
            "weight_decay": train.weight_decay, "decay_norms": train.decay_norms,
            "steps_like_ours": train.optimizer == "adamw" and train.optimizer_state == "fp32",
            "routers": _routers(self.base, job),
        }  # fmt: skip

    def _answer(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _work(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        values = changed(self.base, settings) | {"output": str(self.folder / "runs" / name)}
        if values["device"] == "cuda" and int(values["ranks"]) > torch.cuda.device_count():
            values["backend"] = "gloo"  # ranks that share a card
        return {"kind": "claim", "run": values}

    def show(self, claim: Claim, ranks: Ranks, rows: list[ClaimRow]) -> ClaimRow:
        """Tries a claim, unless it cannot show anything."""
        failed = {row.claim.name for row in rows if row.verdict in (FAIL, UNTRIED)}
        if broken := next((name for name in claim.rests_on if name in failed), None):
            return ClaimRow(claim, UNTRIED, why=f"it rests on: {broken}")
        if not self.plain and claim.name in (MODEL, PACKING):
            return ClaimRow(claim, OPEN, why="the reference does this itself")
        if claim.name == PACKING and not self.packed_documents:
            return ClaimRow(
                claim, OPEN, why="no row of the batch holds two documents: a longer data.sequence_length would"
            )
        try:  # a tiny model has other numbers of heads and experts than the one that the run's axes fit
            check_model_axes(as_run(self.base, claim), self.sized.config)
        except UserError as error:
            return ClaimRow(claim, OPEN, why=f"of {self.sized.description}: {error.field} {error.problem}")
        self.say(f"{claim.name}: {claim.what}")
        folder = self.folder / "claims" / _file_name(claim.name)
        work = self._work(_file_name(claim.name), claim.settings)
        work |= {"against": str(self._answer(claim.batch)), "bounds": asdict(claim.bounds), "ranks": claim.ranks}
        folder.mkdir(parents=True)
        rendezvous = {"device": work["run"]["device"], "timeout": work["run"]["timeout"]}
        rendezvous["backend"] = (
            "nccl" if rendezvous["device"] == "cuda" and work["run"]["backend"] == "auto" else "gloo"
        )
        (folder / "meet.json").write_text(json.dumps(rendezvous))
        started = time.monotonic()
        results = ranks.ask(work | {"folder": str(folder)})
        seconds = time.monotonic() - started
        if (failure := first_failure(results)) is not None:
            rank, report = failure
            reason = report["failed"] if report["kind"] == "user" else f"rank {rank} failed: {report['failed']}"
            return ClaimRow(claim, FAIL, why=reason, seconds=seconds)
        names = json.loads(self._answer(claim.batch).with_suffix(".json").read_text())["names"]
        difference = worst_difference(results, names)
        trouble = difference.trouble(claim.bounds)
        notes = results[0]["notes"]
        if difference.gradient is None:
            notes.append("gradients are used up as they come: their norm and the update are compared")
        return ClaimRow(claim, FAIL if trouble else PASS, difference, trouble, seconds, tuple(notes))


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _routers(base: dict[str, Any], job: ResolvedRun) -> dict[str, Any]:
    """The reference's router settings: the run's own, and the names of biases and their experts."""
    from shardwise.nn.adapters.apply import apply_method
    from shardwise.nn.models.build import build_on_meta
    from shardwise.parallel.expert.apply import count_loads
    from shardwise.parallel.routers.bias import find_biases
    from shardwise.parallel.routers.find import routers_of

    model = build_on_meta(job.source)
    apply_method(model, job.run, job.source.weights)
    routers = routers_of(job.source, model)
    loads = count_loads(model, torch.device("cpu"))
    biases = {} if routers is None or loads is None else find_biases(model, routers.biases, loads)
    names = {name: loads.layers[bias.row] for name, bias in biases.items()} if loads is not None else {}
    settings = base.get("router") or {}
    return {
        "aux_loss": settings.get("aux_loss", "auto"), "z_loss": settings.get("z_loss", "auto"),
        "bias_update": job.run.router.bias_update, "biases": names if job.run.router.bias_update else {},
        "top_k": 0 if routers is None else routers.top_k,
    }  # fmt: skip


def _trained(job: ResolvedRun) -> list[str]:
    from shardwise.nn.adapters.apply import apply_method
    from shardwise.nn.models.build import build_on_meta

    model = build_on_meta(job.source)
    apply_method(model, job.run, job.source.weights)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _documents(job: ResolvedRun, rows: int) -> list[dict[str, torch.Tensor]]:
    """The documents of the first batch one by one, read from the store; the loader decides which."""
    loader = job.loader()
    purpose = purpose_of(job.run)
    documents: list[dict[str, torch.Tensor]] = []
    for sequence in loader.sequences(0, rows):
        for document in sequence:
            ids, learned = (torch.as_tensor(part) for part in loader.document(document))
            ids = ids.long()
            learned = learned.bool()
            if purpose == "causal":
                documents.append({"ids": ids, "learned": learned})
            elif purpose == "seq2seq":
                documents.append({"ids": ids[~learned], "labels": ids[learned]})
            elif purpose in ("masked", "classify"):
                # Which tokens are hidden is drawn by the layout, and a class is its last token: one row of it.
                row = loader.collate([sequence])
                types = {} if row.token_type_ids is None else {"types": row.token_type_ids[0]}
                documents.append({"ids": row.input_ids[0], "labels": row.labels[0], **types})
    return documents
