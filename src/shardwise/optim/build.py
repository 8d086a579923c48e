"""Builds an optimizer over sharded fp32 masters from the config; norms and biases are not decayed.

Bytes of state per parameter: adamw 8 (bf16 4), adamw8bit 2.1, adamw4bit 1.1, adam-mini 4, lion and sgd 4 (bf16 2), muon
4 for matrices and 8 for the rest, adafactor almost none.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.config.schema import Train
from shardwise.core.errors import UserError
from shardwise.optim.adafactor import Adafactor
from shardwise.optim.adam_mini import AdamMini
from shardwise.optim.codecs import FP32, Kind, SharedBlocks, codec_of
from shardwise.optim.elementwise import Elementwise, codec_beside, columns_each
from shardwise.optim.muon import Muon, inner_matrices
from shardwise.optim.rules import rule_of
from shardwise.optim.shards import column_cut, divides


def decay_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, norms: bool = False
) -> list[dict[str, object]]:
    """Returns two groups: matrices and embeddings with decay; norms and biases (one dim or none) without.

    With `norms`, those are decayed too.
    """
    decayed = [p for p in parameters.values() if p.ndim >= 2 or norms]
    not_decayed = [p for p in parameters.values() if p.ndim < 2 and not norms]
    groups = [(decayed, weight_decay), (not_decayed, 0.0)]
    return [{"params": part, "weight_decay": decay} for members, decay in groups for part in _by_mesh(members)]


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters by mesh: those sharded over different ranks (experts) cannot be updated by one call."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(by_mesh.values())


def state_kind(train: Train) -> Kind:
    """Returns how the states of an elementwise optimizer are stored."""
    for suffix in ("8bit", "4bit"):
        if train.optimizer.endswith(suffix):
            return suffix  # type: ignore[return-value]
    return train.optimizer_state


def build_optimizer(parameters: Mapping[str, nn.Parameter], train: Train, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the run's optimizer over the sharded fp32 masters; muon finds embeddings and head in `model`."""
    rate = train.learning_rate
    betas = train.betas
    eps = train.eps
    groups: list[dict[str, Any]] = decay_groups(parameters, train.weight_decay, train.decay_norms)
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=rate, eps=eps)
    if train.optimizer == "adam-mini":
        return AdamMini(groups, lr=rate, betas=betas, eps=eps)
    if train.optimizer == "muon":
        inner = inner_matrices(model, parameters)
        matrices = [p for name, p in parameters.items() if name in inner]
        others = {name: p for name, p in parameters.items() if name not in inner}
        groups = decay_groups(others, train.weight_decay, train.decay_norms)
        if matrices:
            groups.append({"params": matrices, "weight_decay": train.weight_decay, "matrix": True})
        return Muon(groups, lr=rate, betas=betas, eps=eps)
    kind = state_kind(train)
    if train.optimizer == "adamw" and kind == "fp32":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
    check_codes(parameters, kind, train.optimizer)
    rule = rule_of(train.optimizer, betas)
    optimizer = Elementwise(groups, rule, kind, lr=rate, betas=betas, eps=eps, seed=train.seed)
    optimizer.numbers = {p: zlib.crc32(name.encode()) for name, p in parameters.items()}
    return optimizer


def check_codes(parameters: Mapping[str, nn.Parameter], kind: Kind, name: str) -> None:
    """Rejects 4-bit states of parameters whose columns are sharded in the middle of a byte."""
    for parameter_name, parameter in parameters.items():
        coded = codec_of(kind, "exp_avg", parameter.shape) is not FP32
        if kind == "4bit" and coded and column_cut(parameter) is not None and columns_each(parameter) % 2:
            problem = f"a byte holds the states of two columns, and each rank has {columns_each(parameter)} columns "
            problem += f"of {parameter_name}"
            raise UserError("train.optimizer", name, problem, "use optimizer: adamw8bit")


def check_pieces(parameters: Mapping[str, nn.Parameter], kind: Kind, name: str) -> None:
    """Rejects blocks that ranks share where they would not update the same pieces in the same order."""
    codecs = {key: codec_beside(parameter, kind, "exp_avg") for key, parameter in parameters.items()}
    shared = next((key for key, codec in codecs.items() if isinstance(codec, SharedBlocks)), None)
    uneven = next((key for key, parameter in parameters.items() if not divides(parameter)), None)
    if shared is None or uneven is None:
        return
    problem = f"ranks share blocks of {shared}'s states and have to update the same pieces, but {uneven} does not "
    problem += "divide evenly"
    remedy = "use optimizer: adamw, or advanced.master_weights: fp32 and offload.optimizer: none"
    raise UserError("train.optimizer", name, problem, remedy)


def state_bytes(train: Train) -> float:
    """Returns the bytes per parameter of the optimizer's states, without masters; muon's are those of a matrix."""
    fixed = {"adafactor": 0.1, "adam-mini": 4.0, "muon": 4.0}
    if train.optimizer in fixed:
        return fixed[train.optimizer]
    return STORED[state_kind(train)] * len(rule_of(train.optimizer, train.betas).states)


STORED = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.04, "4bit": 0.54}  # bytes per element of a state
