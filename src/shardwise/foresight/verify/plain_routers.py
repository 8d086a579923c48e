"""The reference's side of routers: a model's own loss of a document, by transformers' own code, and biases by formula.

As of plain.py, nothing here is taken from the code that is proven. Names of biases and of the experts that each one is
for are given; what becomes of them is computed here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FLAG = "output_router_logits"


class OwnRouters:
    """What a model's routers add to its loss, and how its biases move.

    `settings`: `aux_loss` and `z_loss` ("auto": as the model's config has it), `bias_update`, and `biases`.
    """

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self._model, self._settings = model, settings
        self._aux, self._z, self.rate = settings["aux_loss"], settings["z_loss"], settings["bias_update"]
        self._asked = any(getattr(c, FLAG, False) for c in (model.config, model.config.get_text_config()))
        self._logits: list[torch.Tensor] = []
        self._loads: dict[str, torch.Tensor] = {}
        self._z_set = self._z != "auto" and self._z > 0
        explicit = self._z_set or (self._aux != "auto" and self._aux > 0)
        named = dict(model.named_modules())
        for name, module in named.items() if explicit else ():
            parent, _, leaf = name.rpartition(".")
            experts = getattr(named.get(f"{parent}.experts"), "num_experts", None)
            if leaf in ("gate", "router") and experts is not None:
                module.register_forward_hook(self._hear(experts))
        for experts in settings["biases"].values() if self.rate else ():
            named[experts].register_forward_pre_hook(self._count(experts), with_kwargs=True)

    @property
    def active(self) -> bool:
        """Whether there is more to the loss than cross-entropy."""
        return self._z_set or (self._asked if self._aux == "auto" else bool(self._aux))

    def loss(self, called: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over the labels of one document, with what the routers add."""
        self._logits.clear()
        if self._aux == "auto" and not self._z_set:
            return torch.as_tensor(called(**_given(ids, labels), **{FLAG: True}).loss)
        output = self._recorded(called, ids, labels)
        logits = [one.flatten(0, -2) for one in output.get("router_logits") or self._logits]
        loss = F.cross_entropy(output.logits[0, :-1].float(), labels[0, 1:])
        if self._aux == "auto" and self._asked:
            loss = output.loss
        elif self._aux != "auto" and self._aux:
            own = output.get("aux_loss")
            loss = loss + self._aux * (self._switch(logits) if own is None else own)
        if self._z_set:
            loss = loss + self._z * torch.stack([one.float().logsumexp(-1).square().mean() for one in logits]).mean()
        return torch.as_tensor(loss)

    def _recorded(self, called: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The model's output with its router logits, where its code hands them out and does not fail at it."""
        try:
            return called(**_given(ids, labels), **{FLAG: True})
        except (TypeError, AttributeError, IndexError):
            self._logits.clear()
            return called(**_given(ids, labels))

    def _switch(self, logits: list[torch.Tensor]) -> torch.Tensor:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        found = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], self._settings["top_k"], None)
        return torch.as_tensor(found)

    def _hear(self, experts: int) -> Any:
        def hear(module: nn.Module, args: Any, output: Any) -> None:
            each = output if isinstance(output, tuple) else (output,)
            fits = [x for x in each if x.is_floating_point() and x.shape[-1] == experts]
            self._logits.append(fits[0].flatten(0, -2))

        return hear

    def _count(self, name: str) -> Any:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            chosen = [*args, *kwargs.values()][1].flatten()
            found = torch.bincount(chosen[chosen < module.num_experts], minlength=module.num_experts)
            self._loads[name] = self._loads[name] + found if name in self._loads else found

        return count

    @torch.no_grad()
    def update(self) -> dict[str, torch.Tensor]:
        """After a step: moves the biases by the loads of its documents; as they are now."""
        named = dict(self._model.named_buffers()) | dict(self._model.named_parameters())
        for name, experts in self._settings["biases"].items() if self.rate else ():
            load = self._loads[experts].float()
            named[name] += self.rate * torch.sign(load.mean() - load).view_as(named[name])
        self._loads.clear()
        return {name: named[name].detach().clone() for name in self._settings["biases"]}


def _given(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}
