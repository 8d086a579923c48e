"""What tests of `shardwise.deepspeed` run on ranks (see ranks.py)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

EXAMPLE = Path(__file__).parents[2] / "examples/deepspeed/train.py"


def script(arguments: list[str], folder: str) -> list[dict[str, float]]:
    """Runs the example as its own program would, and returns what it reports of each update."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [str(EXAMPLE), *arguments, "--losses", f"{folder}/losses.json"]
    module.main()
    dist.barrier()
    return json.loads(Path(f"{folder}/losses.json").read_text())


class Small(nn.Module):
    """Two blocks, a frozen layer, a buffer and tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
        self.frozen = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(ids)) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}


def data(step: int, samples: int = 4) -> torch.Tensor:
    """What all ranks together learn from in a micro-batch."""
    return torch.randint(0, 13, (samples, 6), generator=torch.Generator().manual_seed(step))


def mine(step: int) -> torch.Tensor:
    return data(step).chunk(dist.get_world_size())[dist.get_rank()]


def started(stage: int, **changes: Any) -> tuple[Any, ...]:
    """An engine over `Small`, and the rest of what `initialize` returns."""
    import shardwise.deepspeed as deepspeed

    torch.manual_seed(0)
    return deepspeed.initialize(model=Small(), config=CONFIG | {"zero_optimization": {"stage": stage}} | changes)


def go(engine: Any, first: int, last: int) -> list[float]:
    """Micro-batches, and their losses over all ranks."""
    losses = []
    for step in range(first, last):
        loss = engine(mine(step))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


# zero.Init


class Tricks(nn.Module):
    """Every way in which model code sets its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.table = nn.Parameter(torch.randn(5, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList(nn.Linear(3, 5) for _ in range(2))
        kept = nn.Parameter(torch.empty(3, 3))
        self.kept = kept
        nn.init.eye_(kept)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.apply(self._reset)
        with torch.no_grad():
            self.embed.weight[2].zero_()
            self.table[1:3] = 7.0
            self.table.mul_(self.layers[0].weight)
        self.layers[1].weight.data.normal_(0, 0.02)
        self.layers[1].bias.data = torch.arange(5.0)
        nn.init.trunc_normal_(self.layers[0].weight, std=0.1)
        self.square = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.square)

    def _reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.uniform_(-1, 1)


def born_divided(kind: str) -> dict[str, Any]:
    """A model built inside zero.Init and the same built plainly: values, and how much of it this rank holds."""
    import shardwise.deepspeed as deepspeed
    from shardwise.deepspeed.partition import full_tensor
    from support.tiny import GPT2, LLAMA, TIED

    def build() -> nn.Module:
        torch.manual_seed(0 if kind != "seeds" else dist.get_rank())
        if kind in ("tricks", "seeds"):
            return Tricks()
        from transformers import AutoConfig, AutoModelForCausalLM

        values = dict({"llama": LLAMA, "tied": TIED, "gpt2": GPT2}[kind])
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))

    plain = dict(build().named_parameters())
    with deepspeed.zero.Init():
        model = build()
    divided = dict(model.named_parameters())
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in divided.values())
    return {
        "plain": {n: p.detach().clone() for n, p in plain.items()},
        "divided": {n: full_tensor(p) for n, p in divided.items()},
        "all": sum(p.numel() for p in plain.values()),
        "held": held,
        "kinds": {type(p.data).__name__ for p in divided.values()},
    }


def init_then_train(stage: int, inside: bool) -> list[float]:
    """Training of a model that was, or was not, built inside zero.Init."""
    import shardwise.deepspeed as deepspeed

    torch.manual_seed(0)
    with deepspeed.zero.Init(enabled=inside):
        model = Small()
    assert all(isinstance(p, DTensor) for p in model.parameters()) == inside
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {k: v for k, v in CONFIG.items() if k != "optimizer"} | {"zero_optimization": {"stage": stage}}
    engine, given, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert given is optimizer
    return go(engine, 0, 8)


# zero.GatheredParameters and the fragments


def gathered(stage: int) -> dict[str, Any]:
    """What reading and changing whole parameters does, before and after training steps."""
    import shardwise.deepspeed as deepspeed
    from shardwise.deepspeed.partition import full_tensor

    engine = started(stage)[0]
    go(engine, 0, 2)
    weight, rank = engine.module.blocks[0][0].weight, dist.get_rank()
    before = full_tensor(weight)
    result: dict[str, Any] = {}
    with deepspeed.zero.GatheredParameters(weight):
        result["read"] = bool(torch.equal(weight.data.clone(), before)) and tuple(weight.shape) == (8, 8)
        result["mean"] = abs(weight.mean().item() - before.mean().item()) < 1e-7
        weight.data.zero_()
    result["discarded"] = bool(torch.equal(full_tensor(weight), before))
    with deepspeed.zero.GatheredParameters([weight, engine.module.embed.weight], modifier_rank=1):
        if rank == 1:
            nn.init.constant_(weight, 3.0)
            weight.data[2] = 4.0
            engine.module.embed.weight.data.add_(1.0)
    expected = torch.full((8, 8), 3.0)
    expected[2] = 4.0
    result["kept"] = bool(torch.equal(full_tensor(weight), expected))
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        engine.eval()
        with torch.no_grad():
            result["forward"] = engine(mine(0)).item()
        engine.train()
    with torch.no_grad():
        result["forward again"] = engine(mine(0)).item()
    go(engine, 2, 4)
    with deepspeed.zero.GatheredParameters(weight, enabled=False):
        result["disabled"] = isinstance(weight.data, DTensor)
    return result


def plain_step() -> dict[str, dict[str, torch.Tensor]]:
    """The reference of `fragments`: one update by torch alone, over the data of all ranks."""
    torch.manual_seed(0)
    model = Small()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    for step in range(2):
        (model(data(step)) / 2).backward()
    grads = {n: p.grad.clone() for n, p in trained.items()}
    optimizer.step()
    result = {"grad": grads, "value": {n: p.detach().clone() for n, p in trained.items()}}
    for key in ("exp_avg", "exp_avg_sq"):
        result[key] = {n: optimizer.state[p][key].clone() for n, p in trained.items()}
    return result


def fragments(stage: int) -> dict[str, Any]:
    """Every safe_get_* after one update, and what the safe_set_* change."""
    from shardwise.deepspeed import utils

    engine = started(stage)[0]
    named = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    for step in range(2):
        loss = engine(mine(step))
        engine.backward(loss)
        if step == 0:
            engine.step()
    result: dict[str, Any] = {"grad": {n: utils.safe_get_full_grad(p) for n, p in named.items()}}
    engine.step()
    result["value"] = {n: utils.safe_get_full_fp32_param(p) for n, p in named.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        result[key] = {n: utils.safe_get_full_optimizer_state(p, key) for n, p in named.items()}
    result["frozen"] = utils.safe_get_full_fp32_param(engine.module.frozen.weight)
    weight = engine.module.blocks[0][0].weight
    result["no grad"] = utils.safe_get_full_grad(weight)
    new = torch.arange(64.0).view(8, 8)
    utils.safe_set_full_fp32_param(weight, new)
    utils.safe_set_full_optimizer_state(weight, new + 1, "exp_avg")
    local = utils.safe_get_local_fp32_param(weight)
    assert local is not None
    utils.safe_set_local_fp32_param(weight, local * 2)
    result["set"] = (utils.safe_get_full_fp32_param(weight), utils.safe_get_full_optimizer_state(weight, "exp_avg"))
    result["rows"] = tuple(local.shape)
    for step in range(2, 4):
        engine.backward(engine(mine(step)))
        if step == 2:
            engine.step()
    utils.safe_set_full_grad(weight, new)
    result["set grad"] = utils.safe_get_full_grad(weight)
    return result


# The engine


def boundaries(stage: int) -> dict[str, list[float]]:
    """Three ways to accumulate over two micro-batches that must come to the same."""
    counted = started(stage)[0]
    result = {"counted": go(counted, 0, 8)}
    manual = started(stage)[0]
    losses = []
    for step in range(8):
        manual.set_gradient_accumulation_boundary(step % 2 == 1)
        loss = manual(mine(step))
        manual.backward(loss)
        if step % 2 == 1:
            manual.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    result["manual"] = losses
    if stage <= 1:
        apart, losses = started(stage)[0], []
        for step in range(8):
            if step % 2 == 0:
                with apart.no_sync():
                    loss = apart(mine(step))
                    apart.backward(loss)
                apart.set_gradient_accumulation_boundary(True)
            else:
                loss = apart(mine(step))
                apart.backward(loss)
                apart.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        result["no_sync"] = losses
    return result


def surface() -> dict[str, Any]:
    """What the engine answers along the way."""
    from shardwise.core.errors import UserError

    rows = torch.utils.data.TensorDataset(data(0, 20))
    import shardwise.deepspeed as deepspeed

    torch.manual_seed(dist.get_rank())  # as scripts do that do not seed: rank 0's model counts
    config = CONFIG | {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.7,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    }
    model = Small()
    own = model.head.weight.detach().clone()
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
              {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0}]  # fmt: skip
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, training_data=rows
    )
    first = engine.module_state_dict()["head.weight"]
    result: dict[str, Any] = {
        "sizes": engine.get_batch_info(),
        "loader": (len(loader), len(list(loader)), len(set(loader.data_sampler)) if loader.data_sampler else 0),
        "mine is": (bool(torch.equal(first, own)), dist.get_rank()),
        "same": engine.optimizer is optimizer and engine.lr_scheduler is scheduler,
        "before": (engine.get_global_grad_norm(), engine.global_steps, engine.is_gradient_accumulation_boundary()),
        "decay": [g["weight_decay"] for g in optimizer.param_groups],
        "names": sorted(n for n, _ in engine.named_parameters())[:2],
        "of the model": engine.scale.item(),
    }
    result["rates"] = []
    for step in range(6):
        engine.backward(engine(mine(step)))
        result["rates"].append(engine.get_lr()[0])
        engine.step()
    result["after"] = (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps)
    result["norm"] = engine.get_global_grad_norm()
    result["answers"] = (
        engine.zero_optimization_stage(), engine.gradient_clipping(), engine.fp16_enabled(), engine.bfloat16_enabled(),
        engine.loss_scale(), engine.world_size, engine.dp_world_size, engine.global_rank, str(engine.device),
    )  # fmt: skip
    engine.set_train_batch_size(12)
    result["larger"] = engine.get_batch_info()
    for step in range(3):
        engine.backward(engine(mine(step)))
        engine.step()
    result["one more"] = engine.global_steps
    result["mistakes"] = []
    for mistake in (
        lambda: engine.set_train_batch_size(13),
        lambda: engine.no_sync().__enter__(),
        lambda: engine.nothing,
    ):
        try:
            mistake()
        except (UserError, AttributeError) as error:
            result["mistakes"].append(str(error))
    return result


def breakdown() -> str:
    """What is printed with wall_clock_breakdown on."""
    import contextlib
    import io

    engine = started(3, wall_clock_breakdown=True, steps_per_print=2)[0]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        go(engine, 0, 4)
    return said.getvalue()


def overflow() -> dict[str, Any]:
    """fp16 with a scale that overflows: updates are skipped, the schedule waits, the scale falls."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 2, "loss_scale_window": 100}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}}
    engine = started(2, fp16=fp16, scheduler=schedule, gradient_accumulation_steps=1)[0]
    start = engine.module_state_dict()["head.weight"]
    seen = []
    for step in range(40):
        engine.backward(engine(mine(step)))
        engine.step()
        seen.append((engine.was_step_applied(), engine.cur_scale, engine.lr_scheduler.last_batch_iteration))
    applied = [entry[0] for entry in seen]
    moved = not torch.equal(start, engine.module_state_dict()["head.weight"])
    return {"seen": seen, "skipped": engine.skipped_steps, "not applied": applied.count(False), "moved": moved}


# Checkpoints


def save_all(stage: int, folder: str) -> dict[str, Any]:
    """Trains, saves in every way, trains on."""
    engine = started(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01}})[0]
    go(engine, 0, 4)
    engine.save_checkpoint(folder, client_state={"step": 4, "any": {1, 2}})
    engine.save_checkpoint(folder, tag="light", save_latest=False, exclude_frozen_parameters=True)
    engine.save_16bit_model(folder, "model.bin")
    state = engine.module_state_dict()
    rest = go(engine, 4, 10)
    engine.save_checkpoint(folder, tag="light", save_latest=False)  # written again
    return {"state": state, "rest": rest, "prefixed": set(engine.state_dict())}


def load_and_go(stage: int, folder: str, how: dict[str, Any]) -> dict[str, Any]:
    """Loads with some options and trains on."""
    engine = started(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01}})[0]
    path, client = engine.load_checkpoint(folder, **how)
    result: dict[str, Any] = {"path": path, "client": client, "steps": engine.global_steps, "lr": engine.get_lr()[0]}
    result["state"] = engine.module_state_dict()
    result["rest"] = go(engine, 4, 10) if path is not None else []
    return result


def load_state(stage: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sets the model from whole tensors and reads them back."""
    engine = started(stage)[0]
    engine.load_module_state_dict(state)
    return engine.module_state_dict()


def wrong_arguments() -> dict[str, str]:
    """What is said of arguments that cannot be meant, and what was printed meanwhile."""
    import contextlib
    import io

    import shardwise.deepspeed as deepspeed
    from shardwise.core.errors import UserError

    told = {}

    def attempt(name: str, function: Any) -> None:
        try:
            function()
        except UserError as error:
            told[name] = str(error)

    with contextlib.redirect_stdout(io.StringIO()) as said:
        attempt("model", lambda: deepspeed.initialize(model="x", config=CONFIG))
        attempt("optimizer", lambda: deepspeed.initialize(model=Small(), optimizer=3, config=CONFIG))
        attempt("config", lambda: deepspeed.initialize(model=Small(), config=3))
        told["printed"] = said.getvalue()
    engine = started(2)[0]
    attempt("number", lambda: engine.backward(3.0))
    attempt("shape", lambda: engine.backward(torch.ones(2, 3, requires_grad=True)))
    attempt("detached", lambda: engine.backward(torch.tensor(1.0)))
    attempt("save_dir", lambda: engine.save_checkpoint("/proc/x"))
    return told


def over_axes(config: dict[str, Any], folder: str, steps: int, resume: bool, divided: bool = False) -> dict[str, Any]:
    """A DeepSpeed script over the config's axes, with the loader of `initialize`; losses, norms, the full model."""
    from contextlib import nullcontext

    from transformers import AutoConfig, AutoModelForCausalLM

    import shardwise.deepspeed as deepspeed
    from support.tiny import LLAMA

    values = dict(LLAMA)
    kind = values.pop("model_type")
    torch.manual_seed(0)
    with deepspeed.zero.Init() if divided else nullcontext():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    ids = torch.randint(0, 515, (16, 24), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    given = {"gradient_clipping": 0.5, "optimizer": optimizer} | config
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=rows, config=given)
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    if resume:
        engine.load_checkpoint(folder)
        for _ in range(engine.micro_steps):
            next(batches)
    figures = []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(**next(batches)).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            figures.append(total.item() / dist.get_world_size())
        figures.append(engine.get_global_grad_norm())
    if not resume:
        engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "model.bin")
    unit = engine.mpu
    place = (engine.dp_world_size, engine.get_data_parallel_rank(), engine.train_batch_size())
    named = None if unit is None else (unit.get_model_parallel_world_size(), unit.get_sequence_parallel_world_size())
    return {"figures": figures, "place": place, "mpu": named, "state": engine.module_state_dict()}
