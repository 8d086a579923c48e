"""Prompts, stop tokens, streaming and reproducibility of answers."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from shardwise.core.errors import UserError
from shardwise.nn.generate import Sampling, answer, answers, context_length, prompt_ids, reply, stop_ids


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture
def untrained(model: Any) -> Any:
    """Weights large enough for wild text: broken UTF-8 and no stop token for a while."""
    torch.manual_seed(1)
    wild: Any = type(model)(model.config)
    for weight in wild.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return wild.eval()


def test_greedy_gives_the_learned_answer_every_time(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    for question, expected in pairs.items():
        assert [answer(model, tokenizer, ask(question), Sampling()) for _ in range(2)] == [expected] * 2


def test_the_models_own_generation_settings_and_dropout_stay_out(
    model: Any, tokenizer: Any, pairs: dict[str, str]
) -> None:
    settings = model.generation_config
    settings.update(do_sample=True, temperature=9.0, repetition_penalty=9.0, no_repeat_ngram_size=1, max_length=3)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    model.train()
    for question, expected in pairs.items():
        assert answer(model, tokenizer, ask(question), Sampling()) == expected
    assert model.training and model.generation_config is settings


def test_a_seed_fixes_the_draws_and_spares_the_callers_random_state(model: Any, tokenizer: Any) -> None:
    def draw(seed: int) -> str:
        return answer(model, tokenizer, ask("zzz?"), Sampling(max_tokens=20, temperature=1.5, seed=seed))

    state = torch.get_rng_state()
    texts = [draw(seed) for seed in range(4)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(texts)) > 1
    assert [draw(seed) for seed in range(4)] == texts


def test_sampling_settings_take_effect(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    messages = ask("Hi")
    sampled = Sampling(max_tokens=20, temperature=3.0, seed=0)
    assert answer(model, tokenizer, messages, sampled) != pairs["Hi"]
    narrow = Sampling(max_tokens=20, temperature=3.0, top_p=1e-6, seed=0)
    assert answer(model, tokenizer, messages, narrow) == pairs["Hi"]
    assert answer(model, tokenizer, messages, Sampling(max_tokens=20, repetition_penalty=50.0)) != pairs["Hi"]
    assert reply(model, tokenizer, messages, Sampling(max_tokens=3)).tokens == 3


def test_streamed_pieces_are_whole_characters_and_join_to_the_answer(model: Any, tokenizer: Any) -> None:
    pieces: list[str] = []
    text = answer(model, tokenizer, ask("Draw"), Sampling(), pieces.append)
    assert "".join(pieces) == text == "né 日本 🙂 done"
    assert len(pieces) > 5 and "\ufffd" not in text


def test_streaming_broken_utf8_loses_nothing(untrained: Any, tokenizer: Any) -> None:
    broken = 0
    for question in ("Hi", "What?", "Which colour?", "Draw"):
        pieces: list[str] = []
        text = answer(untrained, tokenizer, ask(question), Sampling(max_tokens=60), pieces.append)
        ids = torch.tensor([prompt_ids(tokenizer, ask(question))])
        whole = untrained.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        new = whole[0, ids.shape[1] :].tolist()
        end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else len(new)
        assert "".join(pieces) == text == tokenizer.decode(new[:end], skip_special_tokens=True)
        broken += "\ufffd" in text
    assert broken  # else this test has tested nothing


def test_stop_ids_come_from_tokenizer_model_and_template(model: Any, tokenizer: Any) -> None:
    im_end, start, bos = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|im_start|>", "<s>"))
    assert stop_ids(tokenizer, model) == {im_end}
    model.generation_config.eos_token_id = [start, bos]
    assert stop_ids(tokenizer, model) == {im_end, start, bos}
    model.generation_config.eos_token_id = bos
    assert stop_ids(tokenizer, model) == {im_end, bos}


def test_template_stop_is_found_when_eos_is_missing(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    tokenizer.eos_token = None
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id is None and model.generation_config.eos_token_id is None
    assert stop_ids(tokenizer, model) == {im_end}
    given = reply(model, tokenizer, ask("Hi"), Sampling())
    assert (given.text, given.ended) == (pairs["Hi"], "stop")
    tokenizer.chat_template = None
    assert stop_ids(tokenizer, model) == set()


def test_blanks_that_are_tokens_do_not_end_a_turn(model: Any, tokenizer: Any) -> None:
    tokenizer.eos_token = None
    tokenizer.add_tokens([AddedToken("   ", normalized=False)])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "   <|im_end|>")
    assert stop_ids(tokenizer, model) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_batch_answers_as_one_by_one(
    model: Any, untrained: Any, tokenizer: Any, batch_size: int, pairs: dict[str, str]
) -> None:
    questions = [*pairs, "zzz?", "Which sky do you like today, and where is it blue?", "Hi"]
    for each in (model, untrained):
        alone = [answer(each, tokenizer, ask(q), Sampling(max_tokens=30)) for q in questions]
        assert len(set(alone)) > 4
        assert answers(each, tokenizer, questions, Sampling(max_tokens=30), batch_size=batch_size) == alone
    assert answers(model, tokenizer, [], Sampling()) == []


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, temperature=1.5, seed=3),
        Sampling(max_tokens=12, repetition_penalty=1.5),
        Sampling(max_tokens=100),  # reaches the end of the context for the longer prompts only
    ],
)
def test_a_batch_that_cannot_share_still_answers_as_one_by_one(
    untrained: Any, tokenizer: Any, sampling: Sampling, pairs: dict[str, str]
) -> None:
    questions = list(pairs)
    alone = [answer(untrained, tokenizer, ask(q), sampling) for q in questions]
    assert answers(untrained, tokenizer, questions, sampling) == alone


def test_a_batch_leaves_out_a_stop_token_that_is_an_ordinary_word(model: Any, tokenizer: Any) -> None:
    model.generation_config.eos_token_id = tokenizer(" how", add_special_tokens=False).input_ids
    assert len(model.generation_config.eos_token_id) == 1
    assert answers(model, tokenizer, ["Hi", "Draw"], Sampling(max_tokens=20)) == ["Hello there,", "né 日本 🙂 done"]


def test_padding_is_no_repetition(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    tokenizer.pad_token_id = tokenizer(" there", add_special_tokens=False).input_ids[0]
    sampling = Sampling(max_tokens=5, repetition_penalty=50.0)
    assert answers(model, tokenizer, list(pairs), sampling)[1] == "Hello there, how"


def test_bos_is_not_doubled(tokenizer: Any) -> None:
    assert tokenizer("<s>x")["input_ids"].count(tokenizer.bos_token_id) == 2  # what the default would do
    ids = prompt_ids(tokenizer, ask("Hi"))
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = None
    assert prompt_ids(tokenizer, ask("Hi")) == [
        tokenizer.bos_token_id,
        *tokenizer("Hi", add_special_tokens=False).input_ids,
    ]


def test_a_prompt_beyond_the_context_is_the_users_mistake(model: Any, tokenizer: Any) -> None:
    messages = ask("sky " * 200)
    size = len(prompt_ids(tokenizer, messages))
    for attempt in (answer, lambda m, t, q, s: answers(m, t, [q[0]["content"]], s)):
        with pytest.raises(UserError, match="128 tokens") as caught:
            attempt(model, tokenizer, messages, Sampling())
        assert caught.value.field == "prompt" and caught.value.value == f"{size} tokens" and caught.value.remedy


def test_an_answer_ends_where_the_context_ends(untrained: Any, tokenizer: Any) -> None:
    tokenizer.chat_template, tokenizer.eos_token = None, None
    given = reply(untrained, tokenizer, ask("Hi " * 20), Sampling(max_tokens=10_000))
    assert given.ended == "context"
    assert given.prompt_tokens + given.tokens == context_length(untrained) == 128


def test_without_a_template_the_last_message_is_completed_and_that_is_said(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    start = "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.warns(UserWarning, match="no chat template"):
        text = answer(
            model, tokenizer, [*ask("ignored"), {"role": "assistant", "content": "x"}, *ask(start)], Sampling()
        )
    assert text == " there, how are you today?"


def test_ctrl_c_stops_the_answer_and_not_the_program(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    pieces: list[str] = []
    settings = model.generation_config

    def interrupt_at_third(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    given = reply(model, tokenizer, ask("Hi"), Sampling(), interrupt_at_third)
    assert given.ended == "interrupted" and given.text == "".join(pieces) == "Hello there"
    assert model.generation_config is settings
    assert answer(model, tokenizer, ask("Hi"), Sampling()) == pairs["Hi"]


def test_a_refusing_template_is_explained(model: Any, tokenizer: Any, pairs: dict[str, str]) -> None:
    rule = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    tokenizer.chat_template = rule + tokenizer.chat_template
    with pytest.raises(UserError, match="no system here"):
        answer(model, tokenizer, [{"role": "system", "content": "x"}, *ask("Hi")], Sampling())
    assert answer(model, tokenizer, ask("Hi"), Sampling()) == pairs["Hi"]


def test_too_little_memory_is_explained(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "generate", full)
    with pytest.raises(UserError, match="memory is too small"):
        answer(model, tokenizer, ask("Hi"), Sampling())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_name_their_field(field: str, value: float) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
