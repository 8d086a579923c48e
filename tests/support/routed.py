"""Training of models with routers, against its definition: each document alone, by transformers' own loss.

The definition shares nothing with what is tested but the documents of a step (which the loader names).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.scenarios import batch_of, parts_of
from support.tiny import LLAMA, PAIRS, saved_model

COEFFICIENT = 0.5  # large, so that what is dropped shows
MIXTRAL = LLAMA | dict(
    model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    router_aux_loss_coef=COEFFICIENT, num_hidden_layers=4,
)  # fmt: skip
DEEPSEEK = LLAMA | dict(
    model_type="deepseek_v3", num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=8,
    num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_hidden_layers=4,
)  # fmt: skip
CONFIGS = {"mixtral": MIXTRAL, "deepseek_v3": DEEPSEEK}
STEPS = 3


def model_folder(folder: Path, name: str, **changes: Any) -> str:
    """A model whose routers have something to say, with biases that are not zero."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        saved_model(folder, CONFIGS[name] | changes)
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
            for bias in biases_of(model).values():
                bias.add_(0.01 * torch.randn(bias.shape, generator=random))
        model.save_pretrained(folder)
    return str(folder)


def routed_run(tmp: Path, model: str, **changes: Any) -> dict[str, Any]:
    """Three accumulated steps of packed rows, with padding."""
    from support.tiny import changed

    run = {
        "model": model,
        "data": {"train": str(PAIRS), "sequence_length": 160, "over_length": "drop"},
        "train": {
            "steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3, "warmup": 0,
            "max_grad_norm": 0.5,
        },
        "precision": "fp32",
        "device": "cpu",
        "checkpoint": {"every": None},
        "export": {"check": False},
        "output": str(tmp / "out"),
    }  # fmt: skip
    return changed(run, changes)


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that balance without a loss."""
    named = dict(model.named_buffers()) | dict(model.named_parameters())
    return {name: tensor for name, tensor in named.items() if name.endswith("e_score_correction_bias")}


def definition(run: dict[str, Any], rate: float = 1e-3, aux: float | None = None, z: float = 0.0) -> dict[str, Any]:
    """Losses by step, the first step's gradients, and parameters and biases at the end.

    `aux`: coefficient of the Switch loss on the router's logits, for models whose own code has none; None = their own
    loss as it is.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from shardwise.optim.build import decay_groups
    from shardwise.optim.schedules import learning_rate

    parts = parts_of(run | {"output": f"{run['output']}-reference", "ranks": 1, "parallel": {}})
    train, loader = parts.job.run.train, parts.loader
    model: Any = AutoModelForCausalLM.from_pretrained(run["model"], attn_implementation="eager")
    model.train()
    optimizer = torch.optim.AdamW(
        decay_groups(dict(model.named_parameters()), train.weight_decay), betas=train.betas, eps=train.eps
    )
    stacks = {n: m for n, m in model.named_modules() if n.endswith("mlp.experts")}
    routers = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    loads: dict[str, torch.Tensor] = {}
    logits: list[torch.Tensor] = []

    def counting(name: str) -> Any:
        def count(module: Any, args: Any) -> None:
            loads[name] = loads.get(name, 0) + torch.bincount(args[1].flatten(), minlength=module.num_experts)

        return count

    for name, stack in stacks.items():
        stack.register_forward_pre_hook(counting(name))
    for router in routers:
        router.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    told: dict[str, Any] = {"losses": [], "aux": [], "z": [], "loads": []}
    for step in range(train.steps):
        documents = [d for s in loader.sequences(step * train.batch_size, train.batch_size) for d in s]
        count = sum(int(d["supervised"]) for d in documents)
        sums = {"losses": 0.0, "aux": 0.0, "z": 0.0}
        loads.clear()
        for document in documents:
            ids, learned = map(torch.as_tensor, loader.document(document))
            ids = ids.long()[None]
            labels = ids.masked_fill(~learned.bool()[None], -100)
            logits.clear()
            output = model(input_ids=ids, labels=labels)
            loss, balance = output.loss, getattr(output, "aux_loss", None)
            if aux is not None:
                balance = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], 2, None)
                loss = loss + aux * balance
            squares = torch.stack([one.float().logsumexp(-1).square().mean() for one in logits]).mean()
            weight = int(document["supervised"]) / count
            ((loss + z * squares) * weight).backward()
            for key, value in (("losses", loss + z * squares), ("aux", balance), ("z", squares)):
                sums[key] += 0.0 if value is None else float(value.detach()) * weight
        for key, value in sums.items():
            told[key].append(value)
        told["loads"].append({name: counts.tolist() for name, counts in loads.items()})
        if step == 0:
            told["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, bias in biases_of(model).items():
                load = loads[name.replace("gate.e_score_correction_bias", "experts")].float()
                bias += rate * torch.sign(load.mean() - load)
    told["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    told["biases"] = {n: b.detach().clone() for n, b in biases_of(model).items()}
    return told


def trained(run: dict[str, Any], bug: str = "") -> dict[str, Any]:
    """The same by the real set-up, step by step, as the loop takes them; `bug` of planted.py is planted."""
    import torch.distributed as dist

    from shardwise.foresight.verify.measure import gradients_of, parameters_of
    from shardwise.optim.schedules import set_rates
    from shardwise.train import loop
    from support import planted

    parts = parts_of(run)
    if bug:  # not before: the trial at the start would refuse the run
        getattr(planted, bug)()
    told: dict[str, Any] = {"losses": [], "figures": [], "loads": [], "gradients": {}}
    settings, world = parts.job.run.train, parts.world
    for step in range(settings.steps):
        loop.seed_step(0, step, world.rank)
        batch = batch_of(parts, step)
        set_rates(parts.optimizer, settings, step, settings.steps)
        summed = loop.accumulate(parts, batch).double() * parts.context.counts
        dist.all_reduce(summed)
        told["losses"].append(float(summed[0]) / batch.supervised)
        figures = zip(parts.objective.figures, (summed[1:] / batch.supervised).tolist(), strict=False)
        told["figures"].append(dict(figures))
        if step == 0:
            told["gradients"] = {n: g.clone() for n, g in gradients_of(parts) if g is not None}
        parts.update()
        told["loads"].append(_loads(parts))  # afterwards, as in the loop: it begins to count anew
    told["parameters"] = {n: p.clone() for n, p in parameters_of(parts)}
    told["biases"] = {n: b.detach().clone() for n, b in biases_of(parts.sharded.model).items()}
    return told


def _loads(parts: Any) -> dict[str, list[int]]:
    """Tokens of each expert in this step, over all ranks: as the loop reports them."""
    records: list[dict[str, Any]] = parts.context.annotate([{}])
    return dict(records[0].get("experts", {}).get("tokens", {}))


def apart(ours: list[dict[str, Any]], definition: dict[str, Any]) -> dict[str, float]:
    """How far the ranks' answers are from the definition, at worst: by what `trained` and `definition` tell."""
    gradients = definition["gradients"]
    largest = max(float(g.abs().max()) for g in gradients.values())
    found = {name for one in ours for name in one["gradients"]}
    assert found == set(gradients), found ^ set(gradients)

    def off(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).abs().max() / (b.abs().max() + 1e-4 * largest))

    def most(key: str, wanted: str) -> float:
        pairs = [(one[key][n], definition[wanted][n]) for one in ours for n in one[key]]
        return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)

    steps = range(len(definition["losses"]))
    figures = {"aux_loss": "aux", "z_loss": "z"}
    return {
        "loss": max(abs(one["losses"][i] - definition["losses"][i]) for one in ours for i in steps),
        "gradient": max(off(g, gradients[n]) for one in ours for n, g in one["gradients"].items()),
        "parameter": most("parameters", "parameters"),
        "bias": most("biases", "biases"),
        "figure": max((abs(one["figures"][i][f] - definition[figures[f]][i]) for one in ours for i in steps
                       for f in figures if f in one["figures"][i]), default=0.0),
        "load": float(max(_load_apart(one["loads"][i], definition["loads"][i]) for one in ours for i in steps)),
    }  # fmt: skip


def _load_apart(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> int:
    assert set(ours) <= set(theirs) and ours, "loads of no layer"
    return max(abs(a - b) for name in ours for a, b in zip(ours[name], theirs[name], strict=True))


def several(runs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What functions of this module give for runs, one after the other in the same processes."""
    return {name: globals()[function](run) for name, (function, run) in runs.items()}


def fitted(run: dict[str, Any]) -> dict[str, Any]:
    """The loop to its end: records, and biases as they are in memory."""
    from shardwise.observe.metrics import read_metrics
    from shardwise.train.loop import fit

    parts = parts_of(run)
    fit(parts)
    records = read_metrics(Path(run["output"]) / "metrics.jsonl")
    biases = {n: b.detach().clone() for n, b in biases_of(parts.sharded.model).items()}
    return {"records": records, "biases": biases, "run": parts.job.run.model_dump(mode="json")}


def one_micro_batch(run: dict[str, Any]) -> dict[str, float]:
    """The first micro-batch's loss per trained token, and the model's own loss of the same padded batch."""
    from transformers import AutoModelForCausalLM

    parts = parts_of(run)
    micro = batch_of(parts, 0).micro_batches[0]
    loss = parts.objective(parts.sharded.model, micro)
    model: Any = AutoModelForCausalLM.from_pretrained(run["model"], attn_implementation="eager")
    labels = torch.cat([torch.full_like(micro.labels[:, :1], -100), micro.labels[:, :-1]], 1)  # shifted by the model
    own = model(input_ids=micro.input_ids, attention_mask=micro.attention_mask, labels=labels)
    units = int((micro.labels != -100).sum())
    return {"ours": float(loss.total.detach()) / units, "own": float(own.loss.detach())}


def judged_batch(run: dict[str, Any]) -> dict[str, float]:
    """Of the first micro-batch of pairs: the loss, the objective's, and the routers' by transformers' own code."""
    from transformers import AutoModelForCausalLM

    parts = parts_of(run)
    batch = batch_of(parts, 0).micro_batches[0]
    loss = parts.context.loss(parts.sharded.model, parts.objective, batch)
    model: Any = AutoModelForCausalLM.from_pretrained(run["model"], attn_implementation="eager")
    flat, numbers = batch.input_ids.flatten(), batch.conversations.flatten()
    each = [model(input_ids=flat[numbers == i][None], output_router_logits=True).aux_loss for i in range(batch.count)]
    pairs = len(loss.by_source) and float(loss.units.sum())
    aux = float(sum(float(one.detach()) for one in each)) * pairs / batch.count
    figures = {name: float(value) for name, value in loss.figures.items()}
    return {"total": float(loss.total.detach()), "aux": aux, **figures}


def own_loop(zero: int, folder: str) -> tuple[list[float], list[float]]:
    """A user's own loop over a model with routers: its losses, and the auxiliary ones among them."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import shardwise

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    engine = shardwise.initialize(model, None, {"parallel": {"zero": zero}, "learning_rate": 1e-3})
    losses, aux = [], []
    for index in range(3):
        ids = torch.randint(4, 500, (4, 24), generator=torch.Generator().manual_seed(index))
        mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
        each = [engine(input_ids=row[None], labels=row[None]) for row in mine]  # one by one: alike on any ranks
        loss = torch.stack([one.loss for one in each]).mean()
        engine.backward(loss)
        engine.step()
        told = torch.stack([loss.detach(), torch.stack([one.aux_loss for one in each]).mean().detach()])
        dist.all_reduce(told)
        losses.append(float(told[0]) / dist.get_world_size())
        aux.append(float(told[1]) / dist.get_world_size())
    return losses, aux
