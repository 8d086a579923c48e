"""Continuous batching: whoever else is served, each answer is the one that its prompt gets alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.answering import Listener, question, running, submit, wait_until
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.core.errors import UserError
from shardwise.nn.generate import Sampling, reply
from shardwise.serve import engine as engine_module
from shardwise.serve.kv import can_join
from shardwise.serve.models import Served
from shardwise.serve.rows import AnswerEnded, Failed, StopText

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "qwen3_next": {
        "head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
QUESTIONS = [
    "Hi",
    "What colour is the sky today, and why?",
    "Draw",
    "zzz?",
    "sky " * 12,
    "Which animal says meow?",
    "a b",
]


def random_model(family: str, words: int) -> Any:
    """Tiny, and wild enough that answers differ."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=words, **SIZES | FAMILIES[family]))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def alone(served: Served, text: str, sampling: Sampling) -> str:
    return reply(served.model, served.tokenizer, [{"role": "user", "content": text}], sampling).text


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_given_alone(family: str, tokenizer: Any) -> None:
    """Requests of different length come in while others are under way, and leave at different times."""
    served = Served("tiny", random_model(family, len(tokenizer)), tokenizer)
    assert can_join(served.model) == (family != "qwen3_next")
    sampling = [Sampling(max_tokens=8 + 5 * i) for i in range(len(QUESTIONS))]
    expected = [alone(served, text, each) for text, each in zip(QUESTIONS, sampling, strict=True)]
    assert len(set(expected)) == len(QUESTIONS)
    with running(served, prefill=64) as engine:
        listeners: list[Listener] = []
        for text, each in zip(QUESTIONS, sampling, strict=True):
            listeners.append(submit(engine, question(served, text, each))[1])
            listeners[-1].next()
        assert all(isinstance(listener.end(), AnswerEnded) for listener in listeners)
        assert [listener.text for listener in listeners] == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=30, temperature=1.3, seed=5),
        Sampling(max_tokens=30, temperature=0.9, top_p=0.8, seed=6),
        Sampling(max_tokens=30, repetition_penalty=1.4),
        Sampling(max_tokens=30, temperature=0.5, repetition_penalty=1.2, seed=1),
    ],
)
def test_seeds_and_penalties_work_as_alone(tokenizer: Any, sampling: Sampling) -> None:
    served = Served("tiny", random_model("llama", len(tokenizer)), tokenizer)
    expected = [alone(served, text, sampling) for text in QUESTIONS]
    assert expected != [alone(served, text, Sampling(max_tokens=30)) for text in QUESTIONS]
    with running(served) as engine:
        listeners = [submit(engine, question(served, text, sampling))[1] for text in QUESTIONS]
        for listener in listeners:
            listener.end()
        assert [listener.text for listener in listeners] == expected


def test_rows_share_a_forward(model: Any, tokenizer: Any) -> None:
    """Twelve answers of ten tokens take little more than ten steps, not 120."""
    served = Served("tiny", model, tokenizer)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with running(served, prefill=4096) as engine:
        calls.clear()
        with engine._wake:  # all are there before the first step
            listeners = [submit(engine, question(served, "Hi", Sampling(max_tokens=10)))[1] for _ in range(12)]
        for listener in listeners:
            listener.end()
    assert 10 <= len(calls) <= 12


def test_two_models_at_once(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    other = Served("wild", random_model("llama", len(tokenizer)), tokenizer)
    tuned = Served("tuned", model, tokenizer)
    wild = alone(other, "Hi", Sampling(max_tokens=20))
    with running(other, tuned) as engine:
        asks = [question(served, "Hi", Sampling(max_tokens=20)) for served in (other, tuned) * 4]
        listeners = [submit(engine, ask)[1] for ask in asks]
        for listener in listeners:
            listener.end()
    assert [listener.text for listener in listeners] == [wild, pairs["Hi"]] * 4


def test_a_switch_is_thrown_before_the_rows_of_its_name(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    """Two names on one set of weights: what an adapter does, here by hand."""
    head = model.lm_head.weight.data
    changed = torch.roll(head, 1, 0)

    def use(weight: torch.Tensor) -> Any:
        return lambda: setattr(model.lm_head.weight, "data", weight)

    base, tuned = Served("base", model, tokenizer, use(head)), Served("tuned", model, tokenizer, use(changed))
    use(changed)()
    expected = alone(tuned, "Hi", Sampling(max_tokens=20))
    assert expected != pairs["Hi"]
    with running(base, tuned) as engine:
        asks = [question(served, "Hi", Sampling(max_tokens=20)) for served in (base, tuned) * 3]
        listeners = [submit(engine, ask)[1] for ask in asks]
        for listener in listeners:
            listener.end()
    assert [listener.text for listener in listeners] == [pairs["Hi"], expected] * 3


def test_the_reason_and_the_count(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    served = Served("tiny", model, tokenizer)
    with running(served) as engine:
        whole = submit(engine, question(served, "Hi", Sampling(max_tokens=20)))[1]
        cut = submit(engine, question(served, "Hi", Sampling(max_tokens=3)))[1]
        stopped = submit(engine, question(served, "Hi", Sampling(max_tokens=20), stop=("how", "zzz")))[1]
        assert whole.end() == AnswerEnded("stop", 10) and whole.text == pairs["Hi"]
        assert cut.end() == AnswerEnded("length", 3)
        end = stopped.end()
        assert isinstance(end, AnswerEnded) and end.reason == "stop" and stopped.text == "Hello there, "


def test_scores_are_the_models_log_probabilities(model: Any, tokenizer: Any) -> None:
    served = Served("tiny", model, tokenizer)
    ask = question(served, "Draw", Sampling(max_tokens=20), top_logprobs=3)
    with running(served) as engine:
        submit(engine, question(served, "Which animal says meow, and where does it like to sleep?", Sampling()))
        listener = submit(engine, ask)[1]
        listener.end()
    scored = [token for piece in listener.pieces for token in piece.scored]
    ids = [one.token for one in scored]
    assert tokenizer.decode(ids) == listener.text
    with torch.no_grad():
        logits = model(torch.tensor([ask.prompt + ids])).logits[0, len(ask.prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)[range(len(ids)), ids]
    torch.testing.assert_close(torch.tensor([one.logprob for one in scored]), wanted, atol=1e-4, rtol=0)
    assert all(one.top[0] == (one.token, one.logprob) and len(one.top) == 3 for one in scored)


def endless(tokenizer: Any) -> Served:
    """A model that never stops by itself."""
    tokenizer.eos_token, tokenizer.chat_template = None, None
    model = random_model("llama", len(tokenizer))
    model.config.max_position_embeddings = 100_000
    return Served("tiny", model, tokenizer)


def test_a_client_that_leaves_frees_its_row(tokenizer: Any) -> None:
    served = endless(tokenizer)
    with running(served, concurrent=1) as engine:
        row, first = submit(engine, question(served, "Hi", Sampling(max_tokens=50_000)))
        _, second = submit(engine, question(served, "Hi", Sampling(max_tokens=2)))
        first.next()
        wait_until(lambda: engine.load() == (1, 1))
        row.cancelled = True
        assert second.end() == AnswerEnded("length", 2)
        wait_until(lambda: engine.load() == (0, 0))


def test_limits_of_time_queue_and_grace(tokenizer: Any) -> None:
    served = endless(tokenizer)
    long = question(served, "Hi", Sampling(max_tokens=50_000))
    with running(served, concurrent=1, queue=2, seconds=0.5) as engine:
        listeners = [submit(engine, long)[1]]
        listeners[0].next()
        listeners += [submit(engine, long)[1] for _ in range(2)]
        assert engine.submit([long], [listeners[0].events.put]) is None, "the queue takes two"
        ends = [listener.end() for listener in listeners]
        assert all(isinstance(end, Failed) and end.status == 504 and "0.5 seconds" in end.message for end in ends)
    with running(served, concurrent=1) as engine:
        running_one, waiting = submit(engine, long)[1], submit(engine, long)[1]
        running_one.next()
        began = time.monotonic()
        engine.drain(0.5)
        assert waiting.end() == Failed(503, engine_module.STOPPING)
        assert running_one.end() == Failed(503, engine_module.STOPPING)
        assert 0.4 < time.monotonic() - began < 60, "50,000 tokens would take minutes"
        assert engine.submit([long], [waiting.events.put]) is None


def test_memory_bounds_what_runs_at_once(tokenizer: Any) -> None:
    served = endless(tokenizer)
    with running(served) as engine:
        ask = question(served, "Hi", Sampling(max_tokens=40))
        engine._memory = 2.5 * ask.need * engine._per_token[served]
        most = 0
        listeners = [submit(engine, ask)[1] for _ in range(6)]
        while engine.load() != (0, 0):
            most = max(most, engine.load()[0])
        assert all(isinstance(listener.end(), AnswerEnded) for listener in listeners)
        assert most == 2
        engine._memory = 1.0  # too little for anything: what fits nowhere is tried alone
        assert isinstance(submit(engine, ask)[1].end(), AnswerEnded)


@pytest.mark.parametrize(("error", "status"), [(torch.OutOfMemoryError("full"), 503), (RuntimeError("bug"), 500)])
def test_a_failed_step_ends_its_requests_and_not_the_server(
    model: Any, tokenizer: Any, error: Exception, status: int, pairs: dict[str, str]
) -> None:
    served, faults = Served("tiny", model, tokenizer), [error]

    def fail(*_: Any) -> None:
        if faults:
            raise faults.pop()

    with running(served) as engine:
        model.register_forward_pre_hook(fail)
        end = submit(engine, question(served, "Hi", Sampling()))[1].end()
        assert isinstance(end, Failed) and end.status == status
        after = submit(engine, question(served, "Hi", Sampling()))[1]
        assert isinstance(after.end(), AnswerEnded) and after.text == pairs["Hi"]


def test_settings_that_overflow_hurt_nobody(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    served = Served("tiny", model, tokenizer)
    odd = [Sampling(20, temperature=1e-40, seed=1), Sampling(20, temperature=1.0, repetition_penalty=1e-40, seed=1)]
    with running(served) as engine:
        listeners = [submit(engine, question(served, "Hi", one))[1] for one in [*odd, Sampling(20)]]
        assert all(isinstance(listener.end(), AnswerEnded) for listener in listeners)
        assert listeners[0].text == listeners[-1].text == pairs["Hi"], "next to no temperature is greedy"


def test_a_request_that_fails_fails_alone(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    served = Served("tiny", model, tokenizer)
    with running(served) as engine:
        with engine._wake:
            row, bad = submit(engine, question(served, "Hi", Sampling(20)))
            good = submit(engine, question(served, "Hi", Sampling(20)))[1]
            row.pieces.tokenizer = None
        assert isinstance(bad.end(), Failed) and isinstance(good.end(), AnswerEnded)
        assert good.text == pairs["Hi"]


def test_a_model_without_such_a_cache_is_refused(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UserError, match="MambaForCausalLM"):
        running(Served("m", AutoModelForCausalLM.from_config(config), tokenizer)).__enter__()


def test_stop_strings_across_pieces() -> None:
    """Against the plain way: join everything, cut at the first stop string."""
    text, stops = "aab aabaac END of aabaaab", ("aabaaab", "END", "c E")
    for size in (1, 2, 3, 7, 100):
        for given in (stops, stops[:1], ("nothing",), ()):
            cut = StopText(given)
            shown = ""
            for at in range(0, len(text), size):
                shown += cut.pass_on(text[at : at + size])
                assert not any(stop in shown for stop in given)
                if cut.hit:
                    break
            shown += cut.pass_on("", final=True)
            places = [text.find(stop) for stop in given if stop in text]
            assert shown == (text[: min(places)] if places else text) and cut.hit == bool(places)
