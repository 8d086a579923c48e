"""Functions that tests run on ranks (see ranks.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def parts_of(run: dict[str, Any]) -> Any:
    """The loop's parts, built by the real set-up."""
    from shardwise.config.load import load_run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.prepare import prepare_run
    from shardwise.train.setup import build_state
    from shardwise.train.status import Status

    job = prepare_run(load_run(run))
    return build_state(job, init_world(job.run), Status(None))


def batch_of(parts: Any, step: int) -> Any:
    """What this rank computes in a step."""
    train, world = parts.job.run.train, parts.world
    return parts.loader.step(
        step * train.batch_size, train.batch_size, train.micro_batch_size, world.place.data, world.layout.data
    )


def full_parameters(parts: Any) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in parts.sharded.model.named_parameters()
    }


def train(run: dict[str, Any]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Runs to the end; losses, gradient norms and final parameters."""
    from pathlib import Path

    from safetensors.torch import load_file

    from shardwise.diloco.worker import join_others
    from shardwise.observe.metrics import read_metrics
    from shardwise.train.loop import fit

    parts = parts_of(run)
    fit(parts, join_others)
    records = [r for r in read_metrics(Path(run["output"]) / "metrics.jsonl") if r["kind"] == "train"]
    # From the exported model, not gathered: on a GPU torch 2.11 crashes in full_tensor() over gloo.
    final = load_file(next((Path(run["output"]) / "model").glob("*model.safetensors")))  # the model's, or an adapter's
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], final


def wire_and_memory(run: dict[str, Any], steps: int = 2) -> tuple[int, dict[str, int], list[dict[str, int]]]:
    """Parameters, elements moved in the last step, and bytes held after each micro-batch of it."""
    from shardwise.parallel.zero.accounting import WireCount, held_bytes
    from shardwise.train.loop import seed_step

    parts = parts_of(run)
    held: list[dict[str, int]] = []
    for step in range(steps):
        seed_step(0, step, parts.world.rank)
        batch = batch_of(parts, step)
        held, wire = [], WireCount()
        with wire:
            scale = parts.sharded.data_parallel_size / batch.supervised
            for index, micro in enumerate(batch.micro_batches):
                parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
                (parts.objective(parts.sharded.model, micro).total * scale).backward()
                held.append(held_bytes(parts.sharded, parts.optimizer))
        parts.update()
    return parts.job.parameters, dict(wire.elements), held


def most_gradients(run: dict[str, Any]) -> tuple[int, int]:
    """The most elements of gradients that were there at once during a step, and the parameters."""
    parts = parts_of(run)
    most = 0

    def look(parameter: torch.Tensor) -> None:
        nonlocal most
        there = [p.grad for p in parts.sharded.parameters.values() if p.grad is not None]
        most = max(most, sum(g.numel() for g in there))

    for parameter in parts.sharded.parameters.values():
        parameter.register_post_accumulate_grad_hook(look)
    from shardwise.train.loop import accumulate

    accumulate(parts, batch_of(parts, 0))
    parts.update()
    return most, parts.job.parameters


def plain_loop(run: dict[str, Any]) -> list[float]:
    """The same training without any of our engine: full model, plain AdamW, one document after the other."""
    from transformers import AutoModelForCausalLM

    from shardwise.optim.build import decay_groups
    from shardwise.optim.schedules import learning_rate

    parts = parts_of(run)
    train, loader = parts.job.run.train, parts.loader
    model = AutoModelForCausalLM.from_config(parts.job.source.config)
    model.load_state_dict(full_parameters(parts))
    groups = decay_groups(dict(model.named_parameters()), train.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=train.betas, eps=train.eps)
    losses, position = [], 0
    for step in range(train.steps):
        left = loader.epochs.left(position) if loader.epochs is not None else train.batch_size
        sequences = loader.sequences(position, min(train.batch_size, left))
        position += len(sequences)
        documents = [d for s in sequences for d in s]
        count = sum(int(d["supervised"]) for d in documents)
        total = 0.0
        for document in documents:
            ids, learned = map(torch.as_tensor, loader.document(document))
            ids = ids[None]
            log_p = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            loss = -(log_p.gather(1, ids[0, 1:, None])[:, 0] * learned[1:]).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def draw() -> torch.Tensor:
    """What this rank's dropout would draw in step 0."""
    import torch.distributed as dist

    from shardwise.train.loop import seed_step

    seed_step(0, 0, dist.get_rank())
    return torch.rand(8)


def load_and_watch(run: dict[str, Any]) -> dict[str, int]:
    """Loads a model at the run's stage; private memory of this rank before, at its peak, and after."""
    import threading
    import time

    from shardwise.config.load import load_run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.prepare import prepare_run
    from shardwise.nn.models.build import build_on_meta
    from shardwise.train.setup import build_model, fill_model

    job = prepare_run(load_run(run))
    world = init_world(job.run)
    build_on_meta(job.source)  # imports the model's code, which is not what is measured
    before, peak, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], private_bytes())
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    sharded, _ = build_model(job, world)
    fill_model(job, sharded, {})
    done.set()
    thread.join()
    peak[0] = max(peak[0], private_bytes())
    held = sum(p.to_local().nbytes for p in sharded.model.parameters())
    return {"before": before, "peak": peak[0], "after": private_bytes(), "held": held}


def private_bytes() -> int:
    """Memory of this process that no other shares: what `kill -9` would give back."""
    total = 0
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            if line.startswith(("Private_Clean", "Private_Dirty")):
                total += int(line.split()[1]) * 1024
    return total


def loaded_parameters(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters right after loading."""
    return full_parameters(parts_of(run))


def gradients(run: dict[str, Any], micro: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, cut into micro-batches of a size."""
    import torch.distributed as dist

    from shardwise.train.loop import accumulate

    parts = parts_of(run)
    world, batch_size = parts.world, parts.job.run.train.batch_size
    batch = parts.loader.step(0, batch_size, micro, world.place.data, world.layout.data)
    loss = accumulate(parts, batch)
    dist.all_reduce(loss)
    grads = {n: p.grad.full_tensor().clone() for n, p in parts.sharded.parameters.items()}
    return loss.item() / batch.supervised, grads


def own_loop(config: dict[str, Any], folder: str, kind: str, steps: int, resume: bool) -> list[float]:
    """A user's loop over `shardwise.initialize`; the mean loss of each micro-batch over all ranks."""
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwise
    from support.tiny import LLAMA

    values = dict(LLAMA)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    optimizer: Any = {
        "default": None,
        "instance": torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        "function": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0),
        "sgd": torch.optim.SGD(model.parameters(), lr=1e-2),
    }[kind]
    engine = shardwise.initialize(model, optimizer, config)
    start = engine.load(folder)["next"] if resume else 0
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for index in range(start, start + steps):
        ids = torch.randint(0, 515, (4, 32), generator=torch.Generator().manual_seed(index % 2))
        mine = ids.chunk(ranks)[rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if not resume:
        engine.save(folder, {"next": start + steps})
    return losses


def loss_two_ways(run: dict[str, Any]) -> tuple[float, float]:
    """The loss per learned token, and the mean of the sequences' means."""
    parts = parts_of(run)
    micro_batches = parts.loader.step(0, parts.job.run.train.batch_size, 1, 0, 1).micro_batches
    losses = [parts.objective(parts.sharded.model, m).total.item() for m in micro_batches]
    counts = [int((m.labels != -100).sum()) for m in micro_batches]
    return sum(losses) / sum(counts), sum(a / b for a, b in zip(losses, counts, strict=True)) / len(losses)


def step_without_sync(run: dict[str, Any]) -> bool:
    """A warm step in which any wait for the device is an error."""
    parts = parts_of(run)
    train, world = parts.job.run.train, parts.world
    for step in range(3):
        batch = batch_of(parts, step)
        mode = "error" if step == 2 else "default"
        for index, micro in enumerate(batch.micro_batches):
            parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
            torch.cuda.set_sync_debug_mode(mode)
            loss = parts.objective(parts.sharded.model, micro.to(world.device))
            parts.scaler.scale(loss.total / batch.supervised).backward()
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_sync_debug_mode(mode)
        norm = parts.sharded.clip(train.max_grad_norm)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.optimizer.zero_grad()
        parts.meter.add(step, 0.0, loss.sums(), norm, batch)
        torch.cuda.set_sync_debug_mode("default")
    return True


def evaluation(run: dict[str, Any]) -> tuple[float, float, int]:
    """The loop's evaluation loss, the same by a plain model one document at a time, and the number of sequences."""
    from transformers import AutoModelForCausalLM

    from shardwise.train.loop import evaluate

    parts = parts_of(run)
    loader = parts.eval_loader
    model = AutoModelForCausalLM.from_config(parts.job.source.config)
    model.load_state_dict(full_parameters(parts))
    total, count = 0.0, 0
    with torch.no_grad():
        stores = [source.store for source in loader.sources]
        places = [(s, c, i) for s in stores for c in range(s.wait()["chunks"]) for i in range(len(s.table(c)))]
        for store, chunk, index in places:
            ids, learned = map(torch.as_tensor, store.document(chunk, index))
            ids, learned = ids[None], learned[1:]
            log_p = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            total -= float((log_p.gather(1, ids[0, 1:, None])[:, 0] * learned).sum())
            count += int(learned.sum())
    return evaluate(parts).loss, total / count, loader.epoch_sequences()


def save_plain(root: str, source: str, layers: int) -> tuple[int, int]:
    """A checkpoint of experts that files have one by one, and a source with tensors that are to be copied.

    By the real store; returns the bytes of the trained tensors and of the others.
    """
    import json
    from pathlib import Path

    import torch.distributed as dist
    from safetensors.torch import save_file

    from shardwise.checkpoint.store import CheckpointStore
    from shardwise.nn.models.build import build_on_meta
    from shardwise.nn.models.names import link
    from shardwise.nn.models.origin import RECORD
    from shardwise.nn.models.source import ModelSource, config_from
    from shardwise.nn.models.stored import sample_digest
    from support.tiny import QWEN3_MOE

    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": layers}
    config = config_from(QWEN3_MOE | sizes)
    model = build_on_meta(ModelSource("m", config, None, "none"))
    tensors = {f"model.{n}": torch.randn(p.shape) for n, p in model.named_parameters()}
    extra = {f"mtp.{n}.weight": torch.randn(512 << 10) for n in range(32)}
    Path(source).mkdir()
    save_file(extra, Path(source) / "model.safetensors", metadata={"format": "pt"})
    names = [name for part in link(model, None).parts for name in part.writes]
    record = {"folder": source, "tensors": dict.fromkeys([*names, *extra], "float32"), "dropped": [], "reason": "",
              "untouched": {n: sample_digest(t) for n, t in extra.items()}, "not_copied": [], "config": {}}  # fmt: skip

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        (folder / RECORD).write_text(json.dumps(record))

    run = {"model": {"name": source}, "data": {"train": "none"}}
    store = CheckpointStore(Path(root), keep=1, background=False, group=dist.group.WORLD)
    store.save(1, tensors, {}, json.dumps(run), write, None)
    return sum(t.nbytes for t in tensors.values()), sum(t.nbytes for t in extra.values())


def export_and_watch(checkpoint: str, target: str, shard_size: int) -> int:
    """Exports, and returns by how much this process's resident memory grew at its peak."""
    from pathlib import Path

    from shardwise.checkpoint.hf import ExportOptions, export_checkpoint

    def resident(name: str) -> int:
        return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

    export_checkpoint(
        Path(checkpoint), Path(target), ExportOptions(dtype="fp32", shard_size=shard_size)
    )  # imports what is not to be measured
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    export_checkpoint(
        Path(checkpoint), Path(target), ExportOptions(dtype="fp32", shard_size=shard_size, overwrite=True)
    )
    return resident("VmHWM") - before


def overflowing_step(run: dict[str, Any]) -> None:
    """Trains with a loss scale that overflows once."""
    from shardwise.train.loop import fit

    parts = parts_of(run)
    scaler = parts.scaler
    adapt = scaler.update
    scaler._scale.fill_(2.0**40)

    def update() -> None:
        adapt()
        scaler._scale.fill_(1024.0)

    scaler.update = update
    fit(parts)


def memory_growth(run: dict[str, Any]) -> tuple[int, int]:
    """Parameters of the model, and by how many bytes this process grew at most in a whole run."""
    import threading
    from pathlib import Path

    from shardwise.train.loop import fit

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

    before, peak, done = own(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        parts = parts_of(run)
        fit(parts)
    finally:
        done.set()
        watcher.join()
    return parts.job.parameters, peak[0] - before


def train_and_record(run: dict[str, Any]) -> tuple[list[tuple[int, list[tuple[int, ...]]]], int]:
    """Trains; the position and the documents of each sequence that this rank computed, and the sequences per epoch."""
    from itertools import pairwise

    from shardwise.train.loop import fit

    parts = parts_of(run)
    train, world, inner = parts.job.run.train, parts.world, parts.objective
    micro, first = int(train.micro_batch_size), parts.position.sequences
    rounds = train.batch_size // (micro * world.size)
    seen: list[tuple[int, list[tuple[int, ...]]]] = []

    def recording(model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():  # not while evaluating
            step, turn = divmod(len(seen) // micro, rounds)
            position = first + step * train.batch_size + (turn * world.size + world.rank) * micro
            for row, (ids, places) in enumerate(zip(batch.input_ids, batch.position_ids, strict=True)):
                starts = [*(places == 0).nonzero().flatten().tolist(), len(ids)]
                documents = [tuple(ids[a:b].tolist()) for a, b in pairwise(starts)]
                seen.append((position + row, [d for d in documents if set(d) != {parts.job.pad_id}]))
        return inner(model, batch)

    recording.figures, recording.of_tokens = (), True  # type: ignore[attr-defined]
    parts.objective = recording
    fit(parts)
    return seen, parts.job.loader().epoch_sequences()


def train_and_count(run: dict[str, Any]) -> tuple[dict[tuple[int, ...], int], int]:
    """Trains; how often this rank trained on each document, by its tokens, and how many rows it computed in vain."""
    from collections import Counter
    from itertools import pairwise

    from shardwise.train.loop import fit

    parts = parts_of(run)
    inner, pad = parts.objective, parts.job.pad_id
    often, vain = Counter[tuple[int, ...]](), 0

    def recording(model: Any, batch: Any) -> Any:
        nonlocal vain
        if torch.is_grad_enabled() and not batch.counts:
            vain += len(batch.input_ids)
        elif torch.is_grad_enabled():  # not while evaluating
            for ids, places in zip(batch.input_ids, batch.position_ids, strict=True):
                starts = [*(places == 0).nonzero().flatten().tolist(), len(ids)]
                often.update(d for a, b in pairwise(starts) if set(d := tuple(ids[a:b].tolist())) != {pad})
        return inner(model, batch)

    recording.figures, recording.of_tokens = (), True  # type: ignore[attr-defined]
    parts.objective = recording
    fit(parts)
    return dict(often), vain


def idle_adapter(run: dict[str, Any]) -> tuple[str, str]:
    """What is said of an adapter that the model passes by, and of one where it does not."""
    from shardwise.parallel.selfcheck import without_gradient
    from shardwise.train.loop import accumulate

    parts = parts_of(run)
    batch = parts.loader.step(0, run["train"]["batch_size"], int(run["train"]["micro_batch_size"]), 0, 1)
    accumulate(parts, batch)
    fine = without_gradient(parts.sharded, parts.update)
    parts.update()
    layer = parts.sharded.model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
    accumulate(parts, batch)
    return without_gradient(parts.sharded, parts.update), fine


def train_each(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """As `train`, one run after the other in the same processes: a later one may resume an earlier one."""
    return {name: train(run) for name, run in runs.items()}


def _engine_over_axes(config: dict[str, Any], kind: str, family: dict[str, Any] | None) -> Any:
    """`shardwise.initialize` on a tiny model of which each rank draws its own values: the first rank's count."""
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwise
    from support.tiny import LLAMA

    values = dict(family or LLAMA)
    torch.manual_seed(dist.get_rank())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    optimizer: Any = None
    if kind == "instance":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return shardwise.initialize(model, optimizer, config)


def own_axes_loop(
    config: dict[str, Any],
    folder: str,
    steps: int,
    resume: bool,
    kind: str = "instance",
    family: dict[str, Any] | None = None,
) -> list[float]:
    """A user's loop over axes: each data rank reads its rows; mean losses of micro-batches, and norms."""
    import torch.distributed as dist

    engine = _engine_over_axes(config, kind, family)
    start = engine.load(folder)["next"] if resume else 0
    losses = []
    for index in range(start, start + steps):
        batch = own_rows(index, engine.data_parallel_rank, engine.data_parallel_world_size)
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(float(loss.detach()))
        if engine.step():
            losses.append(float(engine.grad_norm))  # AdamW does not see how large gradients are
    with torch.no_grad():
        held_out = own_rows(7, engine.data_parallel_rank, engine.data_parallel_world_size)
        losses.append(float(engine.eval()(**held_out).loss))
    engine.train()
    if not resume:
        engine.save(folder, {"next": start + steps})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.data_parallel_rank, losses))
    of_data: dict[int, list[float]] = {}
    for rank, theirs in everyone:
        assert of_data.setdefault(rank, theirs) == theirs  # the same on every rank of a group
    return [sum(column) / len(of_data) for column in zip(*of_data.values(), strict=True)]


def own_rows(index: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A data rank's rows of a batch, each with as many labels: the mean over ranks is that over all."""
    ids = torch.randint(0, 515, (4, 30), generator=torch.Generator().manual_seed(index % 2 + 10 * (index == 7)))
    labels = ids.clone()
    labels[:, 5:9] = -100
    mask = torch.ones_like(ids)
    labels[:, -2:], mask[:, -2:] = -100, 0
    mine = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {name: value.chunk(ranks)[rank] for name, value in mine.items()}


def own_loss_of_logits(config: dict[str, Any], dropout: float) -> tuple[list[float], list[float]]:
    """A user's own loss of the logits, under seeds that differ by rank; and the sums of norms' weights."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwise
    from support.tiny import GPT2

    values = dict(GPT2) | dict(resid_pdrop=dropout, embd_pdrop=dropout)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    engine = shardwise.initialize(model, None, config | {"learning_rate": 1e-2})
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(4):
        engine.train(step in (1, 2))
        batch = own_rows(0, engine.data_parallel_rank, engine.data_parallel_world_size)
        logits = engine(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        if engine.module.training:
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    engine.train()
    norms = [p for name, p in engine.module.named_parameters() if "ln_" in name]
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in norms]
    return losses, [float(weight.detach().double().sum()) for weight in weights]


def own_mistakes(config: dict[str, Any]) -> list[str]:
    """What a user's bad batches are answered with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwise
    from shardwise.core.errors import UserError
    from support.tiny import LLAMA

    values = dict(LLAMA)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    engine = shardwise.initialize(model, None, config)
    ids = torch.arange(24).view(2, 12)
    left = torch.ones_like(ids)
    left[:, :3] = 0
    batches: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "labels": ids, "token_type_ids": ids},
        {"input_ids": ids, "labels": ids, "attention_mask": left},
        {"labels": ids},
    ]
    answers = []
    for batch in batches:
        try:
            engine(**batch)
            answers.append("nothing")
        except UserError as error:
            answers.append(str(error))
    return answers


def own_train_batch(
    config: dict[str, Any],
    folder: str,
    steps: int,
    resume: bool,
    kind: str = "instance",
    family: dict[str, Any] | None = None,
) -> list[float]:
    """A user's `train_batch` over axes: losses and norms of the updates, and a held-out loss."""
    import torch.distributed as dist

    from shardwise.core.errors import UserError

    engine = _engine_over_axes(config, kind, family)
    start = engine.load(folder)["next"] if resume else 0
    place = engine.data_parallel_rank, engine.data_parallel_world_size
    if engine.context.pipeline is not None:
        try:
            engine(**own_rows(0, *place))
            raise AssertionError("the engine of a pipeline was called")
        except UserError as error:
            assert "train_batch" in str(error)
    losses = []
    batches = (own_rows(index, *place) for index in range(start, 1000))
    for _ in range(steps):
        losses.append(float(engine.train_batch(batches)))
        losses.append(float(engine.grad_norm))
    losses.append(float(engine.eval_batch(own_rows(7, *place) for _ in range(100))))
    if not resume:
        engine.save(folder, {"next": start + steps * engine.accumulate})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    assert all(theirs == losses for theirs in everyone)
    return losses
