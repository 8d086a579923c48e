"""Chat templates that do what others do not: each is trained on right and reported, or refused with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat import chat_tokenizer
from support.templates import CHATML, FAMILIES, PHI3, TAGGED, family_tokenizer

from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Document, Example
from shardwise.data.render import Renderer, check_template
from shardwise.data.row_warnings import (
    END_ADDED,
    END_NEXT,
    END_ONCE,
    END_PLAIN,
    FIRST_WORD_CHAT,
    TAGS_DIFFER,
    TAGS_NO_END,
    THOUGHTS_DROPPED,
    explained,
)
from shardwise.data.template import ChatTemplate

TWO = (
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So it is."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "That too."},
)


def rendered(tokenizer: Any, messages: Any, stops: tuple[str, ...] = ()) -> Document | BadRow:
    (document,) = Renderer(tokenizer, "assistant", "data.train.0", stops=stops).render(
        [Example("a:1", 0, "chat", messages)]
    )
    return document


def trained(tokenizer: Any, document: Document | BadRow) -> list[str]:
    assert isinstance(document, Document), document
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.learned.astype(int), [0]])))
    return [tokenizer.decode(document.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


# --- ends --------------------------------------------------------------------------------------------------------


def test_an_end_at_the_end_of_the_conversation_does_not_reach_over_user_turns() -> None:
    for name, lead in (("vicuna", " "), ("metharme", "")):
        tokenizer = family_tokenizer(name)
        document = rendered(tokenizer, TWO)
        end = "\n</s>" if name == "vicuna" else "</s>"
        assert trained(tokenizer, document) == [f"{lead}So it is.", f"{lead}That too.{end}"]
        assert isinstance(document, Document) and document.remarks == (END_ONCE,)
        single = rendered(tokenizer, TWO[:2])
        assert isinstance(single, Document) and single.remarks == ()


def test_plain_text_ends_are_trained_on_and_the_last_stops() -> None:
    tokenizer = chat_tokenizer(PHI3, "<|endoftext|>")  # which has none of the markers
    document = rendered(tokenizer, TWO)
    assert trained(tokenizer, document) == ["So it is.<|end|>", "That too.<|end|>\n<|endoftext|>"]
    assert isinstance(document, Document) and document.remarks == (END_PLAIN + "<|end|>",)
    with pytest.raises(UserError, match="with no special token"):
        check_template(chat_tokenizer(CHATML.replace("<|im_end|>", "<|over|>")), "model.tokenizer")


def test_every_special_token_of_an_end_is_trained_on() -> None:
    tokenizer = family_tokenizer("command-a")
    ends = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    assert trained(tokenizer, rendered(tokenizer, TWO)) == [f"So it is.{ends}", f"That too.{ends}"]


def test_a_role_marker_ends_answers_only_where_the_model_stops_at_it() -> None:
    tokenizer = family_tokenizer("glm")
    document = rendered(tokenizer, TWO, ("<|endoftext|>", "<|user|>"))
    assert trained(tokenizer, document) == ["So it is.<|user|>", "That too.<|user|>"]
    assert isinstance(document, Document) and document.remarks == (END_NEXT + "<|user|>",)
    with pytest.raises(UserError, match="with no special token"):
        rendered(tokenizer, TWO, ("<|endoftext|>",))


def test_a_last_answer_that_is_left_open_gets_the_end_of_earlier_ones() -> None:
    tokenizer = family_tokenizer("apertus")
    for messages, added in ((TWO, True), (TWO[:2], True), (TWO[:3], False)):
        document = rendered(tokenizer, messages)
        assert all(turn.endswith(".<|assistant_end|>") for turn in trained(tokenizer, document))
        assert isinstance(document, Document) and (END_ADDED + "<|assistant_end|>" in document.remarks) == added


def test_stops_come_from_the_models_own_settings(tmp_path: Path) -> None:
    from support.tiny import LLAMA, saved_model

    from shardwise.config.schema import Model
    from shardwise.nn.models.source import find_model

    folder = tmp_path / "model"
    saved_model(folder, LLAMA)
    source = find_model(Model(name=str(folder)))
    tokenizer = source.load_tokenizer()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1, 10**6]}))
    assert source.stop_tokens(tokenizer) == ("<|im_start|>", "<|im_end|>")
    (folder / "generation_config.json").unlink()
    assert len(source.stop_tokens(tokenizer)) == 1  # the config's
    other = find_model(Model(config=LLAMA, tokenizer=str(folder)))
    assert other.stop_tokens(tokenizer) == ()  # a fresh config's ids are of no vocabulary


def test_tokens_that_reach_into_the_next_turn_are_not_trained_on() -> None:
    """`.<|` is one token of this vocabulary, half of it the next turn's."""
    from audit.families import Family
    from audit.templates import tokenizer_for

    family = FAMILIES["metharme"]
    tokenizer = tokenizer_for(Family("metharme"), family.template, "plain")
    runs = trained(tokenizer, rendered(tokenizer, TWO))
    assert runs == ["So it is", "That too.</s>"]


# --- beginnings ---------------------------------------------------------------------------------------------------


def test_the_header_of_a_second_answer_in_a_row_is_not_trained_on() -> None:
    messages = (*TWO[:2], {"role": "assistant", "content": "More."})
    for name in ("asked-once", "chatml", "no-prompt"):
        tokenizer = family_tokenizer(name)
        assert trained(tokenizer, rendered(tokenizer, messages)) == ["So it is.<|im_end|>", "More.<|im_end|>"]
    merging = CHATML.replace("{{ '<|im_start|>' + m.role + '\n' + m.content", (
        "{% if loop.first or m.role != 'assistant' or messages[loop.index0 - 1].role != 'assistant' %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% endif %}{{ m.content"))  # fmt: skip
    bad = rendered(chat_tokenizer(merging), messages)
    assert isinstance(bad, BadRow) and "second answer in a row" in bad.problem and bad.where == "a:1 message 3"


def test_answers_whose_words_are_lost_to_the_prompt() -> None:
    """The prompt ends with a blank, which makes one token with the first word."""
    tokenizer = chat_tokenizer(CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant '").replace(
        "m.role + '\n'", "m.role + ' '"))  # fmt: skip
    document = rendered(tokenizer, ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "the end"}))
    assert isinstance(document, Document) and document.remarks == (FIRST_WORD_CHAT,)
    bad = rendered(tokenizer, ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "the"}))
    assert isinstance(bad, BadRow) and "none of its words" in bad.problem


# --- tool calls ----------------------------------------------------------------------------------------------------

CALLS = [{"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"query": "sky"}}}]


def test_arguments_go_in_as_the_template_takes_them() -> None:
    tokenizer = family_tokenizer("distill")
    messages = (TWO[0], {"role": "assistant", "content": "", "tool_calls": CALLS})
    (turn,) = trained(tokenizer, rendered(tokenizer, messages))
    assert '<|tool_sep|>{"query": "sky"}<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>' in turn
    assert "<|Assistant|>" not in turn


def test_text_beside_calls_that_a_template_moves_is_refused() -> None:
    messages = (TWO[0], {"role": "assistant", "content": "Let me look.", "tool_calls": CALLS})
    bad = rendered(family_tokenizer("distill"), messages)
    assert isinstance(bad, BadRow) and "as a new turn" in bad.problem


def test_python_is_not_taken_for_json() -> None:
    template = CHATML.replace("m.content +", "(m.tool_calls[0].function.arguments if m.tool_calls else m.content) ~")
    tokenizer = chat_tokenizer(template)
    (turn,) = trained(
        tokenizer, rendered(tokenizer, (TWO[0], {"role": "assistant", "content": "", "tool_calls": CALLS}))
    )
    assert turn == '{"query": "sky"}<|im_end|>'


def test_results_that_repeat_the_name_of_a_call_are_not_trained_on() -> None:
    template = CHATML.replace("{{ '<|im_start|>' + m.role", (
        "{% if m.tool_calls %}{{ '<|im_start|>assistant\n' + m.tool_calls[0].function.name + ' '"
        " + m.tool_calls[0].function.arguments | tojson + '<|im_end|>\n' }}"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>tool ' + messages[loop.index0 - 1].tool_calls[0].function.name"
        " + '\n' + m.content + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role")).replace(
        "'<|im_end|>\n' }}{% endfor %}", "'<|im_end|>\n' }}{% endif %}{% endfor %}")  # fmt: skip
    tokenizer = chat_tokenizer(template)
    messages = (
        TWO[0],
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "It is."},
        TWO[1],
    )
    assert trained(tokenizer, rendered(tokenizer, messages)) == [
        'find {"query": "sky"}<|im_end|>',
        "So it is.<|im_end|>",
    ]


# --- tags ----------------------------------------------------------------------------------------------------------


def test_tags_that_leave_out_the_end_of_turn() -> None:
    """As most published ones do: the end is trained on all the same, and the difference is reported."""
    tokenizer = chat_tokenizer(
        TAGGED.replace(
            "m.content + '<|im_end|>' }}{% endgeneration %}", "m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
        )
    )
    document = rendered(tokenizer, TWO)
    assert trained(tokenizer, document) == ["So it is.<|im_end|>", "That too.<|im_end|>"]
    assert isinstance(document, Document) and document.remarks == (TAGS_NO_END,)


def test_tags_that_take_in_the_header() -> None:
    wide = TAGGED.replace(
        "{{ '<|im_start|>' + m.role + '\n' }}{% if",
        "{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\n' }}{% endif %}{% if",
    )
    tokenizer = chat_tokenizer(wide.replace("{% generation %}", "{% generation %}{{ '<|im_start|>assistant\n' }}"))
    document = rendered(tokenizer, TWO)
    assert trained(tokenizer, document) == ["So it is.<|im_end|>", "That too.<|im_end|>"]
    assert isinstance(document, Document) and document.remarks == (TAGS_DIFFER,)


def test_tags_say_where_an_answer_begins() -> None:
    """An empty block of thoughts that the author left out of the tags is not trained on."""
    tokenizer = chat_tokenizer(TAGGED.replace("{% generation %}", "{{ '<think>\n\n</think>\n\n' }}{% generation %}"))
    document = rendered(tokenizer, TWO)
    assert trained(tokenizer, document) == ["So it is.<|im_end|>", "That too.<|im_end|>"]
    assert isinstance(document, Document) and document.remarks == ()


def test_tags_over_what_others_said_are_refused() -> None:
    everyone = (
        CHATML.partition("{% endfor %}")[0].replace("{{", "{% generation %}{{") + "{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(UserError, match="not the assistant's"):
        rendered(chat_tokenizer(everyone + CHATML.partition("{% endfor %}")[2]), TWO)


# --- what is reported ------------------------------------------------------------------------------------------------


def test_dropped_thoughts_are_reported() -> None:
    tokenizer = family_tokenizer("qwen3")
    thinks = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo it is."}
    document = rendered(tokenizer, (TWO[0], thinks, *TWO[2:]))
    assert isinstance(document, Document) and document.remarks == (THOUGHTS_DROPPED,)
    document = rendered(tokenizer, (TWO[0], thinks))
    assert isinstance(document, Document) and document.remarks == ()


def test_each_remark_has_a_sentence() -> None:
    remarks = (
        END_ONCE,
        END_ADDED + "<|x|>",
        END_PLAIN + "{y}",
        END_NEXT + "<|user|>",
        TAGS_NO_END,
        TAGS_DIFFER,
        THOUGHTS_DROPPED,
    )
    sentences = explained({r: (2, "a:1") for r in (*remarks, FIRST_WORD_CHAT)}, 9, "chat", {})
    assert all(text.startswith("2 rows have ") and text.endswith("(the first: a:1)") for text in sentences.values())
    assert "{y}" in sentences[END_PLAIN + "{y}"] and "<|user|>" in sentences[END_NEXT + "<|user|>"]


def test_markers_that_are_not_special_may_not_be_spelled_either() -> None:
    from tokenizers import AddedToken

    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>", "[over]"))
    tokenizer.add_tokens([AddedToken("[over]", special=False), AddedToken("[aside]", special=False)])
    assert trained(tokenizer, rendered(tokenizer, TWO)) == ["So it is.[over]", "That too.[over]"]
    bad = rendered(tokenizer, ({"role": "user", "content": "Why? [over]"}, TWO[1]))
    assert isinstance(bad, BadRow) and "spells [over]" in bad.problem
    fine = rendered(tokenizer, ({"role": "user", "content": "Why? [aside]"}, TWO[1]))
    assert trained(tokenizer, fine) == ["So it is.[over]"]


def test_contents_go_in_as_parts_where_a_template_takes_no_text() -> None:
    tokenizer = family_tokenizer("parts")
    assert trained(tokenizer, rendered(tokenizer, TWO)) == ["So it is.<|im_end|>", "That too.<|im_end|>"]
    assert ChatTemplate(tokenizer).render(TWO[:1]).count("Why?") == 1


# --- through the command -------------------------------------------------------------------------------------------

BESIDE = {"role": "assistant", "content": "Let me look.", "tool_calls": CALLS}
CASES: dict[str, tuple[str, tuple[Any, ...], list[str], str]] = {
    "the end is written once": ("vicuna", TWO, ["So it is.", "That too.⏎\n</s>"], "writes an end of turn once"),
    "two tokens end an answer": (
        "command-a",
        TWO,
        [f"{words}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for words in ("So it is.", "That too.")],
        "",
    ),
    "the next role's marker parts the turns": ("metharme", TWO, ["So it is.", "That too.</s>"], "once"),
    "two answers in a row": (
        "asked-once",
        (*TWO[:2], {"role": "assistant", "content": "More."}),
        ["So it is.<|im_end|>", "More.<|im_end|>"],
        "",
    ),
    "text beside a call": ("distill", (TWO[0], BESIDE), [], "as a new turn"),
    "nothing but the next role's marker": ("glm", TWO, [], "would never learn to stop"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_command_shows_what_is_trained_on(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import cli
    from support.tiny import tiny_run

    from shardwise.cli import main as command_line

    name, messages, turns, said = CASES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    family_tokenizer(name).save_pretrained(tmp_path / "tokenizer")
    values = tiny_run(tmp_path, data__train=str(tmp_path / "rows.jsonl"))
    values["model"]["tokenizer"] = str(tmp_path / "tokenizer")
    with pytest.raises(SystemExit) as left:
        command_line.main(["data", str(cli.write_run(tmp_path, values)), "--rows", "1"])
    shown = capsys.readouterr()
    assert left.value.code == (0 if turns else 2), shown.err
    assert [turn.strip() for turn in re.findall("⟦(?! and ⟧)(.*?)⟧", shown.out, re.S)] == turns
    assert said in shown.out + shown.err
