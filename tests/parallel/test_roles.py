"""Roles found by watching one forward, against what is known of ten families; and tiny models of every class."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support import cli
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

from shardwise.nn.models.tasks import auto_class
from shardwise.nn.tiny.shrink import shrink
from shardwise.parallel.tensor.roles import Roles, find_roles

QKV = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
GATED = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
KNOWN: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("causal", QKV | GATED | {"lm_head": "vocabulary", "embed_tokens": "vocabulary"}),
    "qwen3": ("causal", QKV | GATED),
    "gpt2": ("causal", {"c_attn": "column", "attn.c_proj": "row", "c_fc": "column", "mlp.c_proj": "row"}),
    "falcon": (
        "causal",
        {"query_key_value": "column", "dense": "row", "dense_h_to_4h": "column", "dense_4h_to_h": "row"},
    ),
    "phi": ("causal", {"q_proj": "column", "self_attn.dense": "row", "fc1": "column", "fc2": "row"}),
    "mixtral": ("causal", QKV | {"experts": "experts", "mlp.gate": "whole"}),
    "deepseek_v3": ("causal", {"q_a_proj": "whole", "q_b_proj": "column", "kv_b_proj": "column", "o_proj": "row"}),
    "gpt_oss": ("causal", QKV | {"experts": "experts", "router": "whole"}),
    "bert": ("masked", {"query": "column", "attention.output.dense": "row", "intermediate.dense": "column"}),
    "t5": ("seq2seq", {"q": "column", "EncDecAttention.k": "column", "o": "row", "wi": "column", "wo": "row"}),
}


def roles(kind: str, task: Any) -> Roles:
    torch.manual_seed(0)
    return find_roles(auto_class(task).from_config(shrink(AutoConfig.for_model(kind))))


@pytest.mark.parametrize("kind", KNOWN)
def test_known_families(kind: str) -> None:
    task, wanted = KNOWN[kind]
    found = roles(kind, task)
    assert found.differs == ()
    for end, cut in wanted.items():
        parts = [part for part in found.parts if f".{part.name}".endswith(f".{end}")]
        assert parts and {part.cut for part in parts} == {cut}, (end, parts)


def test_kinds() -> None:
    found = roles("deepseek_v3", "causal")
    assert found["model.layers.2.self_attn.kv_a_proj_with_mqa"].kind == "attention"
    assert found["model.layers.2.mlp.gate"].kind == "router" and found["model.norm"].kind == "norm"
    assert "2 linear layers" in found["model.layers.2.self_attn.q_a_proj"].why


def test_a_difference_from_the_published_plan_is_told() -> None:
    assert any("out_proj: row here" in line for line in roles("qwen3_next", "causal").differs)


def test_the_command() -> None:
    code, out, err = cli.command("plan", "--roles", "smollm2-135m-instruct", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {"name": "lm_head", "kind": "head", "cut": "vocabulary"}.items() <= told["parts"][-1].items()


TABLES: dict[str, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "least"), [("causal", 171), ("masked", 44), ("seq2seq", 33)])
def test_tiny_models_of_every_class(task: Any, least: int) -> None:
    """Each learns from a batch and has its parts named; what fails is told."""
    failed: dict[str, str] = {}
    for kind in TABLES[task]:
        try:
            model = auto_class(task).from_config(shrink(CONFIG_MAPPING[kind]()))
            assert sum(p.numel() for p in model.parameters()) < 1e6, "not tiny"
            ids = torch.arange(32).view(2, 16) + 3
            model(input_ids=ids, labels=ids).loss.backward()
            find_roles(model)
        except Exception as error:
            failed[kind] = f"{type(error).__name__}: {str(error)[:120]}"
    print(f"\n{task}: {len(TABLES[task]) - len(failed)} of {len(TABLES[task])}", *failed.items(), sep="\n")
    assert len(TABLES[task]) - len(failed) >= least
