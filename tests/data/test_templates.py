"""For every family of templates and any conversation: what is learned is the answers with their ends, nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.templates import CHATML, FAMILIES, Message, family_tokenizer, smollm2

from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Document, Example
from shardwise.data.render import Renderer, check_template
from shardwise.data.template import ChatTemplate, TemplateFault

FIELD = "data.train.0"
WORDS = ["The", "sky", "is", "blue", "naïve", "日本語", "🙂👩‍👩‍👧", "a", "of", "x=1;", "{}", "[0]", "100%", "\\n", "'s"]
# What might be mistaken for something else: names of roles, pieces of markup, earlier words, code, blanks.
ODD = [
    "assistant",
    "user",
    "model\n",
    "Assistant: no",
    "User: yes\nAssistant: yes",
    "<|im_start|",
    "[INST",
    "im_end|>",
    "/INST]",
    "a",
    "",
    "(over)",
    "    def f(x):\n        return {'a': [x]}\n",
    "e\u0301 \u202eright to left\u202c",
    "\u00a0",
    "{{ messages }}{% if %}",
    "\ue000qXa0Xq\ue001",
    "Be kind.",
]
TOOLS = ({"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}},)


@pytest.fixture(scope="module", autouse=True)
def _embedded() -> None:
    smollm2()  # from the cache that tests share, before each has one of its own


def words(rng: random.Random, earlier: list[str], blanks: bool) -> str:
    pick = rng.random()
    if pick < 0.25:
        text = rng.choice(ODD)
    elif pick < 0.45 and earlier:
        text = rng.choice(earlier)  # an answer that repeats the question, or a part of it
        text = text[rng.randrange(len(text) + 1) :]
    else:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    return rng.choice(["", "", " ", "\n"]) + text + rng.choice(["", "", " ", "\n\n"]) if blanks else text.strip()


def conversation(rng: random.Random, name: str, blanks: bool = True, tools: bool = False) -> tuple[Message, ...]:
    family, earlier, out = FAMILIES[name], list[str](), list[Message]()
    if family.system and rng.random() < 0.4:
        out.append({"role": "system", "content": words(rng, [], blanks)})
    for _ in range(rng.randint(1, 4)):
        earlier.append(words(rng, earlier, blanks))
        out.append({"role": "user", "content": earlier[-1]})
        if tools and rng.random() < 0.6:
            calls = [_call(rng, n) for n in range(1 if name in ("llama3", "harmony") else rng.randint(1, 2))]
            out.append({"role": "assistant", "content": "", "tool_calls": calls})
            out += [{"role": "tool", "content": words(rng, earlier, blanks), "tool_call_id": c["id"]} for c in calls]
        earlier.append(words(rng, earlier, blanks))
        answer = earlier[-1]
        if name in ("qwen3", "qwen3.5", "deepseek-r1") and rng.random() < 0.5:
            answer = f"<think>\n{answer}\n</think>\n\n{words(rng, earlier, blanks)}"
        out.append({"role": "assistant", "content": answer})
    if rng.random() < 0.15:
        out.append({"role": "user", "content": words(rng, earlier, blanks)})
    return tuple(out)


def family_template(name: str) -> ChatTemplate:
    return ChatTemplate(family_tokenizer(name), FAMILIES[name].stops)


def family_renderer(name: str, kind: str = "bytes", loss_on: str = "assistant") -> Renderer:
    return Renderer(family_tokenizer(name, kind), loss_on, FIELD, stops=FAMILIES[name].stops)


def _call(rng: random.Random, number: int) -> Message:
    arguments: dict[str, Any] = {"query": rng.choice(ODD), "limit": rng.randint(0, 9), "deep": {"on": True}}
    chosen = {k: v for k, v in arguments.items() if rng.random() < 0.7}
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "find", "arguments": chosen}}


def answers(messages: tuple[Message, ...]) -> tuple[int, ...]:
    return tuple(i for i, m in enumerate(messages) if m["role"] == "assistant")


def learned(tokenizer: Any, document: Document) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.learned.astype(int), [0]])))
    return [tokenizer.decode(document.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def one(tokenizer: Any, example: Example, loss_on: str = "assistant") -> Document:
    (document,) = Renderer(tokenizer, loss_on, FIELD).render([example])
    assert isinstance(document, Document), document
    return document


def chat(messages: tuple[Message, ...], **more: Any) -> Example:
    return Example("a.jsonl:1", 0, "chat", messages, **more)


# --- the property ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_places_are_exact_to_the_character(name: str) -> None:
    """Any content, the quick way and the search: the text at the places is what the reference says."""
    rng, family = random.Random(f"places {name}"), FAMILIES[name]
    template = family_template(name)
    for number in range(120):
        tools = TOOLS if family.tools and number % 3 == 0 else ()
        messages = conversation(rng, name, tools=bool(tools))
        text, wanted = template.render(messages, tools), answers(messages)
        expected = [family.turn(messages, i) for i in wanted]
        for find in (template.mask, template.search):
            mask = find(text, messages, wanted, tools)
            found = mask.spans
            assert mask.text.startswith(text)
            assert [mask.text[a:b] for a, b in found] == expected, messages
            assert all(a <= b <= c for (_, a), (b, c) in zip([(0, 0), *found], found, strict=False))


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "smollm2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_learned_tokens_are_the_answers_and_their_ends(name: str, kind: str) -> None:
    rng, family, tokenizer = random.Random(f"{kind} {name}"), FAMILIES[name], family_tokenizer(name, kind)
    conversations = [conversation(rng, name, blanks=False) for _ in range(25)]
    rendered = list(family_renderer(name, kind).render([chat(m) for m in conversations]))
    for messages, document in zip(conversations, rendered, strict=True):
        assert isinstance(document, Document), document
        expected = [family.turn(messages, i) for i in answers(messages)]
        assert learned(tokenizer, document) == [turn for turn in expected if turn]
        text = rendered_text(name, tokenizer, messages)
        assert document.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def rendered_text(name: str, tokenizer: Any, messages: tuple[Message, ...]) -> str:
    """What is tokenised: the rendering, and behind a last answer that it leaves open the end of it."""
    if name == "parts":
        messages = tuple(m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    added = {"glm": "<|user|>", "apertus": "<|assistant_end|>"}.get(name, "")
    return text + added if messages[-1]["role"] == "assistant" else text


@pytest.mark.parametrize("name", FAMILIES)
def test_blanks_at_the_edges_are_lost_only_to_a_token_of_the_prompt(name: str) -> None:
    rng, family, tokenizer = random.Random(f"blanks {name}"), FAMILIES[name], family_tokenizer(name, "smollm2")
    conversations = [conversation(rng, name) for _ in range(20)]
    documents = family_renderer(name, "smollm2").render([chat(messages) for messages in conversations])
    for messages, document in zip(conversations, documents, strict=True):
        assert isinstance(document, Document)
        runs = learned(tokenizer, document)
        expected = [turn for i in answers(messages) if (turn := family.turn(messages, i))]
        assert len(runs) == len(expected)
        for run, turn in zip(runs, expected, strict=True):
            assert turn.endswith(run) and not turn[: len(turn) - len(run)].strip()


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.tools])
def test_tool_calls_are_learned_and_results_are_not(name: str) -> None:
    rng, family, tokenizer = random.Random(f"tools {name}"), FAMILIES[name], family_tokenizer(name)
    seen, renderer = 0, Renderer(tokenizer, "assistant", FIELD)
    for _ in range(20):
        messages = conversation(rng, name, blanks=False, tools=True)
        seen += any("tool_calls" in m for m in messages)
        (document,) = renderer.render([chat(messages, tools=TOOLS)])
        assert isinstance(document, Document), document
        assert learned(tokenizer, document) == [family.turn(messages, i) for i in answers(messages)]
        assert ("Finds." in tokenizer.decode(document.tokens)) == ("tools" in family.template)
    assert seen > 5


def test_bos_is_there_once_whoever_writes_it() -> None:
    from support.chat import chat_tokenizer

    for template in (CHATML, "{{ bos_token }}" + CHATML):
        tokenizer = chat_tokenizer(template, bos="<s>", adds_bos=True)
        tokens = one(tokenizer, chat(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))).tokens
        assert tokens.tolist().count(tokenizer.bos_token_id) == (template is not CHATML)  # as chat templates do
        for example in (
            Example("a", 0, "text", text="<s>words"),
            Example("a", 0, "text", text="words"),
            Example("a", 0, "segments", segments=(("<s>q", False), ("a", True))),
            Example("a", 0, "pair", prompt="q", text=" a"),
        ):
            tokens = one(tokenizer, example).tokens.tolist()
            assert tokens[0] == tokenizer.bos_token_id and tokens.count(tokenizer.bos_token_id) == 1


def test_every_family_ends_its_answers() -> None:
    for name in FAMILIES:
        check_template(family_tokenizer(name), "model.tokenizer", FAMILIES[name].stops)


def test_a_template_with_tags_learns_what_the_tags_say() -> None:
    rng, tokenizer = random.Random(4), family_tokenizer("tagged", "smollm2")
    for _ in range(10):
        messages = conversation(rng, "tagged", blanks=False)
        marked = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert one(tokenizer, chat(messages)).learned.tolist() == [bool(b) for b in marked["assistant_masks"]]


# --- changes to a template ---------------------------------------------------------------------------------------

TWO = (
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So it is."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "That too."},
)
MUTATIONS = {
    "trailing newline": (CHATML + "{{ '\n' }}", ["So it is.<|im_end|>", "That too.<|im_end|>"]),
    "no newline": (CHATML.replace("<|im_end|>\n", "<|im_end|>"), ["So it is.<|im_end|>", "That too.<|im_end|>"]),
    "trims": (CHATML.replace("m.content", "m.content | trim"), ["So it is.<|im_end|>", "That too.<|im_end|>"]),
    "trims the left": (
        CHATML.replace("m.content", "m.content.lstrip()"),
        ["So it is.<|im_end|>", "That too.<|im_end|>"],
    ),
    "blank before the end": (
        CHATML.replace("'<|im_end|>", "'\n<|im_end|>"),
        ["So it is.\n<|im_end|>", "That too.\n<|im_end|>"],
    ),
    "quotes the answer": (
        CHATML.replace("m.content +", "('\"' + m.content + '\"' if m.role == 'assistant' else m.content) +"),
        ['"So it is."<|im_end|>', '"That too."<|im_end|>'],
    ),
    "header with the number of the turn": (
        CHATML.replace("m.role + '\n'", "m.role + ' ' ~ loop.index0 ~ '\n'").replace(
            "assistant\n'", "assistant ' ~ messages | length ~ '\n'"
        ),
        ["So it is.<|im_end|>", "That too.<|im_end|>"],
    ),
    "no end of the last": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}",
        ["So it is.<|im_end|>", "That too.<|im_end|>"],
    ),
    "another end for the last": (
        CHATML.replace(
            "'<|im_end|>\n'", "('<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>\n')"
        ),
        ["So it is.<|im_end|>", "That too.<|endoftext|>"],
    ),
    "a further token at the end of the conversation": (
        CHATML.partition("{% if add")[0] + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% else %}{{ '<|endoftext|>' }}{% endif %}",
        ["So it is.<|im_end|>", "That too.<|im_end|>"],
    ),
    "length of the conversation in front": (
        "{{ messages | length ~ '\n' }}" + CHATML,
        ["So it is.<|im_end|>", "That too.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_templates(mutation: str) -> None:
    template, expected = MUTATIONS[mutation]
    from support.chat import chat_tokenizer

    tokenizer = chat_tokenizer(template)
    assert learned(tokenizer, one(tokenizer, chat(TWO))) == expected


REFUSED = {
    "capitals": (CHATML.replace("m.content", "m.content | upper"), "changes the assistant's text"),
    "first line only": (CHATML.replace("m.content", "m.content[:4]"), "changes the assistant's text"),
    "cuts old answers": (
        CHATML.replace("m.content", "(m.content if loop.last else m.content[:4])"),
        "rewrites earlier turns",
    ),
    "twice": (CHATML.replace("m.content", "m.content + m.content"), "changes the assistant's text"),
    "no end": (CHATML.replace("<|im_end|>", ""), "with no special token"),
    "only the next role's marker": (FAMILIES["glm"].template, "with no special token"),
    "plain text": (CHATML.replace("<|im_end|>", "</end>"), "with no special token"),
    "another end of the question before the prompt": (
        CHATML.replace("'<|im_end|>\n'", "('<|endoftext|>' if loop.last else '<|im_end|>\n')"),
        "rewrites earlier turns",
    ),
    "another prompt": (
        CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>answer now\n'"),
        "rewrites earlier turns",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_templates_without_a_unique_answer_are_refused(case: str) -> None:
    from support.chat import chat_tokenizer

    template, problem = REFUSED[case]
    tokenizer = chat_tokenizer(template)
    with pytest.raises(UserError, match=problem) as caught:
        list(Renderer(tokenizer, "assistant", FIELD).render([chat(TWO)]))
    assert caught.value.field == "model.tokenizer" and caught.value.value == "a.jsonl:1"
    document = one(tokenizer, chat(TWO), loss_on="all")  # which needs no answers
    assert document.learned[1:].all()


def test_an_answer_that_a_template_changes_is_the_rows_fault_if_others_are_not() -> None:
    from support.chat import chat_tokenizer

    tokenizer = chat_tokenizer(CHATML.replace("m.content", "m.content | replace('So', 'Thus')"))
    bad, good = Renderer(tokenizer, "assistant", FIELD).render([chat(TWO), chat(TWO[2:])])
    assert isinstance(bad, BadRow) and bad.where == "a.jsonl:1 message 2" and "changes the text" in bad.problem
    assert isinstance(good, Document)
    thoughts = "<think>\na\n</think>\n\nb <think>c</think> d"  # of which this template writes a and d
    (bad,) = Renderer(family_tokenizer("qwen3"), "assistant", FIELD).render(
        [chat((TWO[0], {"role": "assistant", "content": thoughts}))]
    )
    assert isinstance(bad, BadRow)


def test_end_of_turn_is_checked_before_the_run() -> None:
    from support.chat import chat_tokenizer

    for case in ("no end", "only the next role's marker", "plain text", "capitals"):
        with pytest.raises(UserError) as caught:
            check_template(chat_tokenizer(REFUSED[case][0]), "model.tokenizer")
        assert REFUSED[case][1] in caught.value.problem
    with pytest.raises(TemplateFault):
        ChatTemplate(chat_tokenizer(REFUSED["no end"][0])).check()


def test_rows_that_a_template_refuses_are_named_and_the_others_go_on() -> None:
    tokenizer = family_tokenizer("no-system")
    rows = [chat(TWO), chat(({"role": "system", "content": "x"}, *TWO)), chat((*TWO[:1], *TWO[:1])), chat(TWO)]
    kinds = list(Renderer(tokenizer, "assistant", FIELD).render(rows))
    assert [type(k) for k in kinds] == [Document, BadRow, BadRow, Document]
    assert isinstance(kinds[1], BadRow) and "no system message" in kinds[1].problem


def test_content_beside_tool_calls_that_a_template_leaves_out_is_refused() -> None:
    calls = [{"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {}}}]
    messages = (TWO[0], {"role": "assistant", "content": "Let me look.", "tool_calls": calls})
    qwen = family_tokenizer("qwen2.5")
    assert learned(qwen, one(qwen, chat(messages)))[0].startswith("Let me look.\n<tool_call>")
    for name, problem in (("mistral-v3", "leaves out the content"), ("chatml", "does not write the assistant's tool")):
        (bad,) = Renderer(family_tokenizer(name), "assistant", FIELD).render([chat(messages)])
        assert isinstance(bad, BadRow) and problem in bad.problem


def test_markup_in_tools_and_calls_is_refused() -> None:
    tokenizer = family_tokenizer("qwen2.5")
    calls = [{"type": "function", "function": {"name": "find", "arguments": {"query": "<|im_end|>"}}}]
    rows = [
        chat((TWO[0], {"role": "assistant", "content": "", "tool_calls": calls})),
        chat(TWO, tools=({"type": "function", "function": {"name": "<|im_start|>"}},)),
    ]
    for bad in Renderer(tokenizer, "assistant", FIELD).render(rows):
        assert isinstance(bad, BadRow) and "markup" in bad.problem


# --- which messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral-v3", "qwen3"])
def test_last_and_weights(name: str) -> None:
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    first, last = family.turn(TWO, 1), family.turn(TWO, 3)
    assert learned(tokenizer, one(tokenizer, chat(TWO), "last")) == [last]
    assert learned(tokenizer, one(tokenizer, chat(TWO, weights=(None, 0, None, None)))) == [last]
    assert learned(tokenizer, one(tokenizer, chat(TWO, weights=(None, 1, None, 0)), "last")) == [first]
    assert learned(tokenizer, one(tokenizer, chat(TWO, weights=(0, 0, 0, 0)))) == []
    everything = one(tokenizer, chat(TWO, weights=(None, None, None, 0)), "all")
    assert last not in "".join(learned(tokenizer, everything)) and first in "".join(learned(tokenizer, everything))
    asked = learned(tokenizer, one(tokenizer, chat(TWO, weights=(1, 0, 0, 0))))
    assert len(asked) == 1 and asked[0].startswith("Why?")


def test_an_unlearned_answer_may_begin_the_conversation() -> None:
    tokenizer = family_tokenizer("chatml")
    messages = ({"role": "assistant", "content": "Hello."}, *TWO)
    assert learned(tokenizer, one(tokenizer, chat(messages), "last")) == ["That too.<|im_end|>"]
    (bad,) = Renderer(tokenizer, "assistant", FIELD).render([chat(messages)])
    assert isinstance(bad, BadRow) and "begins with the assistant" in bad.problem


# --- other kinds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "smollm2"])
def test_segments(kind: str) -> None:
    tokenizer = family_tokenizer("chatml", kind)
    segments = (("Q: why?", False), (" Because", True), (" of it.", True), ("\nQ: and?", False), (" No 🙂", True))
    document = one(tokenizer, Example("a", 0, "segments", segments=segments))
    assert tokenizer.decode(document.tokens) == "".join(t for t, _ in segments) + "<|im_end|>"
    assert learned(tokenizer, document) == [" Because of it.", " No 🙂<|im_end|>"]
    document = one(tokenizer, Example("a", 0, "segments", segments=segments[:4]))
    assert document.tokens[-1] == tokenizer.eos_token_id and not document.learned[-1]


def test_tokens_are_taken_as_they_are() -> None:
    tokenizer = family_tokenizer("chatml")
    document = one(tokenizer, Example("a", 3, "tokens", tokens=(5, 6, 7), learned=(True, False, True)))
    assert document.tokens.tolist() == [5, 6, 7] and document.learned.tolist() == [False, False, True]
    assert document.number == 3
    assert one(tokenizer, Example("a", 0, "tokens", tokens=(5, 6))).learned.tolist() == [False, True]
    for wrong in ({"tokens": (1, -1)}, {"tokens": (1, len(tokenizer))}, {"tokens": (1, 2), "learned": (True,)}):
        (bad,) = Renderer(tokenizer, "assistant", FIELD).render([Example("a", 0, "tokens", **wrong)])
        assert isinstance(bad, BadRow)


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "smollm2"])
def test_pair(kind: str) -> None:
    tokenizer = family_tokenizer("chatml", kind)
    document = one(tokenizer, Example("a", 0, "pair", prompt="What is the", text=" state of it?"))
    assert document.tokens.tolist()[:-1] == tokenizer("What is the state of it?", add_special_tokens=False)["input_ids"]
    assert learned(tokenizer, document)[0].strip() == "state of it?<|im_end|>"
    # A token of both is the prompt's; if that is the whole answer, the row is refused rather than learned as silence.
    straddling = one(tokenizer, Example("a", 0, "pair", prompt="What is ", text="the state"))
    assert "state<|im_end|>" in learned(tokenizer, straddling)[0]
    silent = one(tokenizer, Example("a", 0, "pair", prompt="Say nothing.", text=""))
    assert learned(tokenizer, silent) == ["<|im_end|>"]


def test_pair_whose_answer_is_part_of_the_prompts_last_token() -> None:
    tokenizer = family_tokenizer("chatml", "smollm2")
    (bad,) = Renderer(tokenizer, "assistant", FIELD).render([Example("a", 0, "pair", prompt="Answer: ", text="yes")])
    assert isinstance(bad, BadRow) and "part of the token" in bad.problem and "beginning of the answer" in bad.remedy


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral-v3", "qwen3", "harmony"])
def test_preference(name: str) -> None:
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    good, bad = ({"role": "assistant", "content": c} for c in ("Yes, certainly.", "Go away."))
    example = Example("a", 0, "preference", TWO[:3], chosen=(good,), rejected=(bad,))
    renderer = Renderer(tokenizer, "assistant", FIELD)
    chosen, rejected = renderer.render_preference(example)
    assert learned(tokenizer, chosen) == [family.turn((*TWO[:3], good), 3)]
    assert learned(tokenizer, rejected) == [family.turn((*TWO[:3], bad), 3)]
    start = int(np.argmax(chosen.learned))
    assert start == np.argmax(rejected.learned) and (chosen.tokens[:start] == rejected.tokens[:start]).all()
    wanted = renderer.render_kto(Example("a", 0, "kto", TWO[:3], chosen=(good,), label=True))
    assert wanted.tokens.tolist() == chosen.tokens.tolist() and (wanted.learned == chosen.learned).all()
    with pytest.raises(UserError, match="preference rows"):
        list(renderer.render([example]))
    with pytest.raises(BadRow, match="no answer"):
        renderer.render_preference(Example("a", 0, "preference", TWO[:3], chosen=(TWO[0],), rejected=(bad,)))


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="no fast version"):
        Renderer(Slow(), "assistant", FIELD)


def test_truncation_in_the_tokenizers_file_does_not_cut_rows() -> None:
    from support.chat import chat_tokenizer

    tokenizer = chat_tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=512)
    assert learned(tokenizer, one(tokenizer, chat(TWO))) == ["So it is.<|im_end|>", "That too.<|im_end|>"]
