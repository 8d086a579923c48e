"""Where routers are and what a model's own loss makes of them, found by running a tiny model of each class."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from shardwise.parallel.routers import find
from shardwise.parallel.routers.find import find_routers

BIAS = "e_score_correction_bias"
# architecture: experts that its own loss counts for a token, coefficient, and its bias, as its class's config has them
OWN: dict[str, tuple[int, float, str]] = {
    "mixtral": (2, 0.001, ""),
    "olmoe": (8, 0.01, ""),
    "gpt_oss": (4, 0.001, ""),  # its routers have a bias that is trained: no balance
    "jamba": (2, 0.001, ""),  # a plain linear layer
    "jetmoe": (2, 0.01, ""),  # attention's experts count twice
    "ernie4_5_moe": (6, 0.001, f"mlp.gate.moe_statics.{BIAS}"),  # a frozen parameter
    "deepseek_v4": (6, 0.001, f"mlp.gate.{BIAS}"),  # layers whose tokens are hashed have no router of this kind
}
NONE: dict[str, tuple[int, str]] = {  # their code has no loss for routers
    "deepseek_v3": (8, f"mlp.gate.{BIAS}"),
    "lfm2_moe": (4, "feed_forward.expert_bias"),
    "deepseek_v2": (2, ""),
    "afmoe": (6, "mlp.expert_bias"),
}


@pytest.mark.parametrize("name", OWN)
def test_its_own_loss_by_our_sums(name: str) -> None:
    found = find_routers(CONFIG_MAPPING[name](), "causal")
    top_k, coefficient, bias = OWN[name]
    assert found is not None and not found.trouble and not found.enabled
    assert (found.top_k, found.coefficient) == (top_k, coefficient)
    assert [one.partition("*.")[2] for one in found.biases.values()] == ([bias] if bias else [])
    times = {site.pattern.rpartition("*.")[2]: site.times for site in found.sites}
    assert times == (
        {"self_attention.experts.router": 2, "mlp.router": 1} if name == "jetmoe" else {next(iter(times)): 1}
    )


@pytest.mark.parametrize("name", NONE)
def test_routers_without_a_loss_of_their_own(name: str) -> None:
    found = find_routers(CONFIG_MAPPING[name](), "causal")
    top_k, bias = NONE[name]
    assert found is not None and found.coefficient is None and not found.trouble
    assert found.top_k == top_k and found.sites
    assert [one.partition("*.")[2] for one in found.biases.values()] == ([bias] if bias else [])


def test_the_numbers_are_the_configs() -> None:
    config = CONFIG_MAPPING["mixtral"](
        num_local_experts=24, num_experts_per_tok=5, output_router_logits=True, router_aux_loss_coef=0.037
    )
    found = find_routers(config, "causal")
    assert found is not None and (found.enabled, found.top_k, found.coefficient) == (True, 5, 0.037)


def test_a_dense_model_has_none() -> None:
    assert find_routers(CONFIG_MAPPING["llama"](), "causal") is None


def test_own_code_that_fails_is_told() -> None:
    found = find_routers(CONFIG_MAPPING["granitemoe"](output_router_logits=True), "causal")
    assert found is not None and found.enabled and "transformers' own code fails" in found.trouble
    assert found.sites and found.top_k == 2  # the Switch loss can be had by a number


def test_other_kinds_of_models() -> None:
    switch = find_routers(CONFIG_MAPPING["switch_transformers"](output_router_logits=True), "seq2seq")
    assert switch is not None and switch.enabled and "encoder–decoder" in switch.trouble
    # A classifier's own loss has nothing of its routers, whatever the config says.
    sorter = find_routers(CONFIG_MAPPING["mixtral"](num_labels=3, output_router_logits=True), "classify")
    assert sorter is not None and sorter.enabled and sorter.coefficient is None and sorter.sites


def test_sums_that_are_not_its_own_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose loss weighs the last layer more: what is counted is the same, the loss is not."""
    from transformers.models.mixtral import modeling_mixtral

    plain = modeling_mixtral.load_balancing_loss_func

    def other(logits: Any, *args: Any) -> Any:
        return plain(logits, *args) + plain(logits[-1:], *args)

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", other)
    found = find_routers(CONFIG_MAPPING["mixtral"](), "causal")
    assert found is not None and "formula of its own" in found.trouble


def test_gradients_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    plain = modeling_mixtral.load_balancing_loss_func

    def other(logits: Any, *args: Any) -> Any:
        found = plain(logits, *args)
        return found.detach() + 2 * (found - found.detach())

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", other)
    found = find_routers(CONFIG_MAPPING["mixtral"](), "causal")
    assert found is not None and "the gradient of" in found.trouble


@pytest.mark.slow
def test_all_architectures() -> None:
    """None is counted wrongly without a word: its own loss is ours, or there is a reason."""
    from shardwise.foresight.zoo.run import architectures

    right, none, refused = set(), set(), {}
    for name in architectures("causal"):
        try:
            config = CONFIG_MAPPING[name]()
            found = find_routers(config, "causal")
        except Exception:  # not every class has a tiny model that runs here
            continue
        if found is None or not (found.sites or found.biases or found.enabled):
            continue
        if found.trouble:
            refused[name] = found.trouble
        elif found.coefficient is None:
            none.add(name)
        else:
            right.add(name)
    print(f"{len(right)} own loss: {sorted(right)}\n{len(none)} without one: {sorted(none)}\nrefused: {refused}")
    assert len(right) >= 20 and len(none) >= 20
    assert set(refused) <= {"dbrx", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"}


def test_it_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.nn.models.build import build_on_meta
    from shardwise.nn.models.source import ModelSource

    calls: list[int] = []
    plain = find.find_routers
    monkeypatch.setattr(find, "find_routers", lambda *args: calls.append(1) or plain(*args))
    config = CONFIG_MAPPING["mixtral"](hidden_size=32, num_hidden_layers=2, intermediate_size=40, vocab_size=77)
    source = ModelSource("tiny", config, None, "none", task="causal")
    model = build_on_meta(source)
    assert find.routers_of(source, model) == find.routers_of(source, model) and len(calls) == 1
    dense = CONFIG_MAPPING["llama"](hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=77)
    plain_source = ModelSource("tiny", dense, None, "none", task="causal")
    assert find.routers_of(plain_source, build_on_meta(plain_source)) is None and len(calls) == 1
