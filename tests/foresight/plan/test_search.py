"""The search: what it may propose, what it picks, and that it says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.families import config_of

from shardwise.config.schema import Model, Run
from shardwise.core.errors import UserError
from shardwise.core.hardware.specs import Cluster, cluster_of
from shardwise.foresight.plan.explain import guidelines, long_time, money, reasons
from shardwise.foresight.plan.models import find_config, hub_name, model_names
from shardwise.foresight.plan.quick import sizes_of
from shardwise.foresight.plan.result import as_dict
from shardwise.foresight.plan.search import Plan, search
from shardwise.foresight.plan.strategies import applied, enumerate_strategies, legal
from shardwise.foresight.rehearse.ledger import WORKSPACE
from shardwise.nn.models.source import ModelSource, config_from

SIZES = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.9, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
    "qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7, "mistral-7b": 7.25,
    "gemma-2-9b": 9.24, "gpt2-xl": 1.56, "falcon-7b": 6.92, "smollm2-135m": 0.1345, "phi-4-mini": 3.84,
    "bert-base": 0.11, "t5-base": 0.223, "gpt-oss-20b": 20.9, "qwen3-235b-a22b": 235.1,
}  # fmt: skip


FIRST = ("llama-3.1-405b", "qwen3-30b-a3b", "gpt2-xl", "t5-base")


@pytest.mark.parametrize(
    ("name", "billions"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] not in FIRST)) for one in SIZES.items()],
)
def test_known_models_have_their_published_sizes(name: str, billions: float) -> None:
    sizes = sizes_of(find_config(Model(name=name)))
    assert (sizes.layers * sizes.block + sizes.rest) / 1e9 == pytest.approx(billions, rel=0.01)


def test_models_are_found_as_people_write_them() -> None:
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", "Llama-3.1-8B"):
        assert find_config(Model(name=name)).config.hidden_size == 4096
    assert hub_name("llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    assert "gpt2" in model_names()
    with pytest.raises(UserError, match=r"did you mean llama-3\.1-8b"):
        find_config(Model(name="lama-3.1-8b"))


def a_source(family: str = "llama", layers: int = 8) -> ModelSource:
    sizes = {"num_hidden_layers": layers, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    return ModelSource(family, config_from(config_of(family) | sizes), None, "none")


def a_run(cluster: Cluster, **settings: Any) -> Run:
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
        "data": {"train": "none", "sequence_length": 256}, "objective": "causal", "precision": "bf16",
        "device": "cuda", "ranks": cluster.ranks, "backend": "nccl",
        "train": {"batch_size": 2 * cluster.ranks, "micro_batch_size": 1, "steps": 1},
    }  # fmt: skip
    return Run.model_validate(values | settings)


def small(memory: float, nodes: int = 1, per_node: int = 4) -> Cluster:
    cluster = cluster_of("h100", nodes, per_node)
    return replace(cluster, device=replace(cluster.device, memory=int(memory)))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_is_enumerated_is_legal(family: str) -> None:
    cluster, source = small(8e9, 2, 4), a_source(family)
    run = a_run(cluster)
    found = list(enumerate_strategies(source.config, run, cluster))
    assert {s.zero for s in found} == {0, 1, 2, 3} and max(s.tensor for s in found) == 4
    assert any(s.expert > 1 for s in found) == (family == "mixtral")
    assert any(s.secondary for s in found) and any(s.shard for s in found) and any(s.pipeline > 1 for s in found)
    wrong = [
        (s.name(), problem) for s in found[::7] if (problem := legal(applied(run, s), source.config, cluster.ranks))
    ]
    assert len(wrong) < 0.2 * len(found[::7]), wrong[:5]


@pytest.fixture(scope="module")
def plan() -> Plan:
    cluster = small(8e9)
    return search(a_source(), a_run(cluster), cluster, budget=0.0)


def test_the_best_fits_and_says_why(plan: Plan) -> None:
    assert plan.best is not None and plan.best.estimate.fits
    assert plan.considered > 20 and plan.options == sorted(plan.options, key=lambda o: o.estimate.time.seconds)
    told = " ".join(reasons(plan))
    assert "GiB" in told or "MiB" in told
    assert all(rule and here for rule, here, _ in guidelines(plan))
    values = as_dict(plan, 1e9)
    best = values["strategies"][0]
    assert best["fits"] and best["cost"] > 0 and sum(best["memory"].values()) == pytest.approx(best["peak"], abs=20)
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])


def test_less_memory_makes_it_divide_more(plan: Plan) -> None:
    assert plan.best is not None
    peak = plan.best.estimate.peak
    cluster = small(WORKSPACE + 0.8 * (peak - WORKSPACE))
    tight = search(a_source(), a_run(cluster), cluster, budget=0.0)
    assert tight.best is not None and tight.best.estimate.peak < peak
    assert tight.best.estimate.time.seconds >= 0.99 * plan.best.estimate.time.seconds
    nothing = search(a_source(), a_run(cluster), small(1e8), budget=0.0)
    assert nothing.best is None and "none of" in reasons(nothing)[0]


def test_small_plans_have_words_too() -> None:
    told = [long_time(hours) for hours in (0.005, 0.02, 0.5, 5.25, 100.0)]
    assert told == ["18 seconds", "72 seconds", "30 minutes", "5.2 hours", "4.2 days"]
    assert [money(cost) for cost in (0.008, 3.456, 1234.5)] == ["0.01", "3.46", "1,234"]
