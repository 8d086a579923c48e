"""The reference: one process, one document at a time, transformers' own forward with eager attention, the plain loss,
plain AdamW.

It shares no code with what is verified: no loader, packing, objective, sharding or optimizer of ours. Its input are
documents (token ids and a loss mask) and a folder for `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.foresight.verify.compare import write_reference
from shardwise.foresight.verify.plain_routers import OwnRouters

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2  # the second shows that the first one's update arrived


def answer(work: dict[str, Any]) -> dict[str, Any]:
    """Computes the reference's result and writes it; `work` comes from the Prover."""
    device = torch.device(work["device"])
    model = _model(work).to(device)
    trained = _trained(model, work)
    forward = _in_half(model, HALVES[work["precision"]]) if work["precision"] in HALVES else model
    routers = OwnRouters(model, work["routers"])
    documents = torch.load(work["documents"], weights_only=True)
    count = sum(_loss_units(entry, work["task"]) for entry in documents)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained.values() if _decays(p, work)], "weight_decay": work["weight_decay"]},
            {"params": [p for p in trained.values() if not _decays(p, work)], "weight_decay": 0.0},
        ],
        lr=work["learning_rate"], betas=tuple(work["betas"]), eps=work["eps"],
    )  # fmt: skip
    figures: dict[str, Any] = {"units": count, "documents": len(documents)}
    gradients: dict[str, torch.Tensor] = {}
    parameters: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        total = 0.0
        for document in documents:
            if _loss_units(document, work["task"]):
                loss = _summed_loss(forward, document, work["task"], device, routers) / count
                loss.backward()
                total += loss.item()
            elif routers.rate:  # its tokens are routed too
                with torch.no_grad():
                    ids = document["ids"][None].to(device)
                    forward(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        norm = sum(float(p.grad.double().square().sum()) for p in trained.values() if p.grad is not None) ** 0.5
        figures |= {"loss" if step == 0 else "after": total, "norm" if step == 0 else "after_norm": norm}
        if step == 0:
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        if work["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(trained.values(), work["clip"])
        optimizer.step()
        optimizer.zero_grad()
        biases = routers.update()
        if step == 0:
            parameters = {n: p.detach().clone() for n, p in trained.items()} | biases
            figures["biases"] = list(biases)
    if not work["steps_like_ours"]:  # another optimizer: the gradients are to be compared, what becomes of them is not
        figures.pop("after")
        parameters = {name: parameters[name] for name in figures["biases"]}
    write_reference(Path(work["answer"]), gradients, parameters, figures)
    return figures


def _model(work: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, work["auto_class"])
    transformers.utils.logging.set_verbosity_error()
    # Eager attention is the model's definition: what is faster may compute something else, and SDPA does for some.
    options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": work["trust_remote_code"]}
    model: Any = kind.from_pretrained(work["model"], **options)
    model.config.use_cache = False
    return model.train()  # without dropout: the folder's config has none


def _in_half(model: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """The model computing in half precision on fp32 weights: the effect of rounding alone."""

    def forward(**kwargs: Any) -> Any:
        halves = {n: p.to(dtype) for n, p in model.named_parameters()}
        return torch.func.functional_call(model, halves, kwargs=kwargs)

    return forward


def _trained(model: Any, work: dict[str, Any]) -> dict[str, nn.Parameter]:
    """The parameters that the run trains, by name; low-rank updates are added by hooks, as in the paper."""
    parameters = dict(model.named_parameters())
    added: dict[str, nn.Parameter] = {}
    if work["adapter"]:
        from safetensors.torch import load_file

        for key, tensor in load_file(Path(work["adapter"]) / "adapter_model.safetensors").items():
            name = key.removeprefix("base_model.model.").removesuffix(".weight")
            added[name] = nn.Parameter(tensor.to(work["device"]))
        for module, scale in work["scales"].items():
            _add_low_rank(model.get_submodule(module), added[f"{module}.lora_A"], added[f"{module}.lora_B"], scale)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in work["trained"])
    return {name: added[name] if name in added else parameters[name] for name in work["trained"]}


def _add_low_rank(module: nn.Module, down: nn.Parameter, up: nn.Parameter, scale: float) -> None:
    def add(_: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return out + scale * F.linear(F.linear(args[0], down.to(out.dtype)), up.to(out.dtype))

    module.register_forward_hook(add)


def _decays(parameter: torch.Tensor, work: dict[str, Any]) -> bool:
    return parameter.ndim >= 2 or bool(work["decay_norms"])


def _loss_units(document: dict[str, torch.Tensor], task: str) -> int:
    """Loss units of a document: its loss tokens, or 1 for a classified document."""
    if task == "causal":
        return int(document["learned"][1:].sum())
    if task == "classify":
        return 1
    return int((document["labels"] != -100).sum())


def _summed_loss(
    model: Any, document: dict[str, torch.Tensor], task: str, device: torch.device, routers: OwnRouters
) -> torch.Tensor:
    """Summed -log p over a document's loss tokens; where routers add to it, the model's own loss."""
    ids = document["ids"][None].to(device)
    extra = {"token_type_ids": document["types"][None].to(device)} if "types" in document else {}
    if task == "causal" and routers.active:
        labels = ids.masked_fill(~document["learned"][None].to(device), -100)
        return routers.loss(model, ids, labels) * _loss_units(document, task)
    if task == "causal":
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1]
        learned = document["learned"][1:].to(device)
        return F.cross_entropy(logits[learned].float(), ids[0, 1:][learned], reduction="sum")
    labels = document["labels"].to(device)
    if task == "seq2seq":
        # transformers shifts the target itself, and averages.
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels[None], use_cache=False).loss
        return torch.as_tensor(loss * len(labels))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0].float()
    return F.cross_entropy(logits if task == "masked" else logits[None], labels, reduction="sum")
