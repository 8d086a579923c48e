"""Routers in the reference: the model's own loss of a document by transformers' code, and biases by formula.

As in plain.py, nothing here shares code with what is verified. Names of biases and of their experts are given; their
updates are computed here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FLAG = "output_router_logits"


class OwnRouters:
    """The auxiliary losses of a model's routers, and the updates of their biases.

    `settings`: `aux_loss` and `z_loss` ("auto": as the model's config has it), `bias_update`, and `biases`.
    """

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self._model = model
        self._settings = settings
        self._aux = settings["aux_loss"]
        self._z = settings["z_loss"]
        self.rate = settings["bias_update"]
        self._asked = any(getattr(c, FLAG, False) for c in (model.config, model.config.get_text_config()))
        self._logits: list[torch.Tensor] = []
        self._loads: dict[str, torch.Tensor] = {}
        self._z_set = self._z != "auto" and self._z > 0
        explicit = self._z_set or (self._aux != "auto" and self._aux > 0)
        modules = dict(model.named_modules())
        for name, module in modules.items() if explicit else ():
            parent, _, leaf = name.rpartition(".")
            experts = getattr(modules.get(f"{parent}.experts"), "num_experts", None)
            if leaf in ("gate", "router") and experts is not None:
                module.register_forward_hook(self._record_logits(experts))
        for experts in settings["biases"].values() if self.rate else ():
            modules[experts].register_forward_pre_hook(self._count(experts), with_kwargs=True)

    @property
    def active(self) -> bool:
        """Whether the loss has terms besides cross-entropy."""
        return self._z_set or (self._asked if self._aux == "auto" else bool(self._aux))

    def loss(self, forward: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss over one document's labels, with the routers' terms."""
        self._logits.clear()
        if self._aux == "auto" and not self._z_set:
            return torch.as_tensor(forward(**_model_inputs(ids, labels), **{FLAG: True}).loss)
        output = self._recorded(forward, ids, labels)
        logits = [layer.flatten(0, -2) for layer in output.get("router_logits") or self._logits]
        loss = F.cross_entropy(output.logits[0, :-1].float(), labels[0, 1:])
        if self._aux == "auto" and self._asked:
            loss = output.loss
        elif self._aux != "auto" and self._aux:
            aux_loss = output.get("aux_loss")
            loss = loss + self._aux * (self._switch(logits) if aux_loss is None else aux_loss)
        if self._z_set:
            loss = (
                loss + self._z * torch.stack([layer.float().logsumexp(-1).square().mean() for layer in logits]).mean()
            )
        return torch.as_tensor(loss)

    def _recorded(self, forward: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The model's output with its router logits, if its code can return them."""
        try:
            return forward(**_model_inputs(ids, labels), **{FLAG: True})
        except (TypeError, AttributeError, IndexError):
            self._logits.clear()
            return forward(**_model_inputs(ids, labels))

    def _switch(self, logits: list[torch.Tensor]) -> torch.Tensor:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        loss = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], self._settings["top_k"], None)
        return torch.as_tensor(loss)

    def _record_logits(self, experts: int) -> Any:
        def hear(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            router_logits = [x for x in outputs if x.is_floating_point() and x.shape[-1] == experts]
            self._logits.append(router_logits[0].flatten(0, -2))

        return hear

    def _count(self, name: str) -> Any:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            chosen = [*args, *kwargs.values()][1].flatten()
            load = torch.bincount(chosen[chosen < module.num_experts], minlength=module.num_experts)
            self._loads[name] = self._loads[name] + load if name in self._loads else load

        return count

    @torch.no_grad()
    def update(self) -> dict[str, torch.Tensor]:
        """Moves the biases by the loads of the step's documents, and returns them."""
        tensors = dict(self._model.named_buffers()) | dict(self._model.named_parameters())
        for name, experts in self._settings["biases"].items() if self.rate else ():
            load = self._loads[experts].float()
            tensors[name] += self.rate * torch.sign(load.mean() - load).view_as(tensors[name])
        self._loads.clear()
        return {name: tensors[name].detach().clone() for name in self._settings["biases"]}


def _model_inputs(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}
