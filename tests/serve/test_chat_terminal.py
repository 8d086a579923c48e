"""Scripted conversations: what a terminal shows, what a script reads, what /save leaves on disk."""

from __future__ import annotations

import copy
import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from shardwise.core.errors import Interrupted, UserError
from shardwise.nn.generate import Sampling, reply
from shardwise.serve import chat as chat_module
from shardwise.serve.chat import Conversation, Terminal, changed, chat
from shardwise.serve.transcript import append_chat_row

SKY, CAT, LONG = "What colour is the sky?", "Which animal says meow, and where does it like to sleep?", "sky " * 200


class Keys:
    """Stands for input(): gives out lines, raises what is an exception, and ends with Ctrl-D."""

    def __init__(self, *keys: str | type[BaseException]) -> None:
        self.keys = list(keys)

    def __call__(self, prompt: str) -> str:
        key = self.keys.pop(0) if self.keys else EOFError
        if isinstance(key, str):
            return key
        raise key


Play = Callable[..., tuple[str, Conversation]]


@pytest.fixture
def play(model: Any, tokenizer: Any) -> Play:
    """Plays keys in an interactive chat and returns the screen and the conversation."""

    def _play(*keys: str | type[BaseException], **given: Any) -> tuple[str, Conversation]:
        screen, read = io.StringIO(), Keys(*keys)
        load, look = given.pop("load", None), given.pop("look", {"width": 200})
        conversation = Conversation(model, tokenizer, given.pop("sampling", Sampling(max_tokens=20)), **given)
        Terminal(conversation, Console(file=screen, **look), read, load).run("tiny")
        assert not read.keys, f"left before {read.keys}"
        return screen.getvalue(), conversation

    return _play


def test_a_session_streams_answers_with_their_speed(play: Play, pairs: dict[str, str]) -> None:
    screen, talk = play("Hi", "", "   ", SKY, "/quit")
    assert screen.startswith("tiny\n")
    assert f"{pairs['Hi']}\n10 tokens · " in screen and "tokens/s" in screen
    assert [q for q, _ in talk.turns] == ["Hi", SKY] and talk.turns[0][1] == pairs["Hi"]


def test_the_model_sees_system_and_earlier_turns(
    play: Play, monkeypatch: pytest.MonkeyPatch, pairs: dict[str, str]
) -> None:
    seen: list[list[str]] = []

    def spy(model: Any, tokenizer: Any, messages: Any, *rest: Any) -> Any:
        seen.append([f"{m['role']}:{m['content']}" for m in messages])
        return reply(model, tokenizer, messages, *rest)

    monkeypatch.setattr(chat_module, "reply", spy)
    play("Hi", "/system be kind", "Draw", "/undo", "/system", "one\\", "two", "/reset", " /Hi", system="be brief")
    hi = ["user:Hi", f"assistant:{pairs['Hi']}"]
    assert seen == [
        ["system:be brief", "user:Hi"],
        ["system:be kind", *hi, "user:Draw"],
        [*hi, "user:one\ntwo"],
        ["user:/Hi"],
    ]


def test_undo_and_reset_take_turns_back(play: Play) -> None:
    screen, talk = play("/undo", "Hi", "Draw", "/undo")
    assert [q for q, _ in talk.turns] == ["Hi"]
    assert "nothing to take back" in screen and "taken back: Draw" in screen
    assert play("Hi", "/reset")[1].turns == []


def test_retry_replaces_the_answer(play: Play, pairs: dict[str, str]) -> None:
    screen, talk = play("/retry", "Hi", "/retry")
    assert talk.turns == [("Hi", pairs["Hi"])] and screen.count(pairs["Hi"]) == 2
    assert "no question to answer again" in screen and "temperature is 0" in screen
    sampling = Sampling(max_tokens=20, temperature=2.5, seed=1)
    first, again = (play("zzz?", *keys, sampling=sampling)[1].turns for keys in ((), ("/retry",)))
    assert len(again) == 1 and first != again  # a retry draws anew …
    assert play("zzz?", "/retry", sampling=sampling)[1].turns == again  # … yet the session as a whole repeats


def test_a_failed_retry_keeps_the_old_answer(
    play: Play, monkeypatch: pytest.MonkeyPatch, pairs: dict[str, str]
) -> None:
    calls: list[int] = []

    def second_fails(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise UserError("prompt", None, "no memory", "shorten it")
        return reply(*given)

    monkeypatch.setattr(chat_module, "reply", second_fails)
    screen, talk = play("Hi", "/retry")
    assert "no memory" in screen and talk.turns == [("Hi", pairs["Hi"])]


def test_set_changes_and_shows_settings(play: Play) -> None:
    screen, talk = play("/set max_tokens=2 top_p=0.5", "Hi", "/set max_tokens=x", "/set temprature=1", "/set top_p=7")
    assert talk.sampling == Sampling(max_tokens=2, top_p=0.5)
    assert "2 tokens · " in screen and "cut at max_tokens=2 (/set max_tokens=4)" in screen
    assert "is not a number" in screen and "settings: temperature" in screen and "out of range" in screen
    assert changed(Sampling(seed=3), ["seed=None"]).seed is None


def test_set_takes_a_blank_for_the_equals_sign(play: Play) -> None:
    _, talk = play("/set temperature 0.7", "/set seed 3 max_tokens 5")
    assert talk.sampling == Sampling(max_tokens=5, temperature=0.7, seed=3)


def test_tokens_counts_what_the_model_sees(play: Play, tokenizer: Any, pairs: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": pairs["Hi"]}]
    used = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    screen, _ = play("/tokens", "Hi", "/tokens")
    assert "0 tokens of 128, 128 left" in screen and f"{used} tokens of 128, {128 - used} left" in screen


def test_load_goes_on_where_save_left(play: Play, tmp_path: Path, pairs: dict[str, str]) -> None:
    path = tmp_path / "talk.jsonl"
    play("Draw", f"/save {path}", "/reset", "/system be kind", "Hi", f"/save {path}")
    screen, talk = play("/load", "Draw", f"/load {path}", "/retry")
    assert "name a file" in screen and "1 turn loaded, and a system message" in screen
    assert talk.system == "be kind" and [q for q, _ in talk.turns] == ["Hi"]
    (tmp_path / "odd.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
    for name, words in (("none.jsonl", "No such file"), ("odd.jsonl", "alternate"), ("talk.jsonl", "is no chat")):
        if name == "talk.jsonl":
            path.write_text("# notes")
        screen, talk = play("Hi", f"/load {tmp_path / name}")
        assert words in screen and talk.turns == [("Hi", pairs["Hi"])], "what was there stays"


def test_compare_shows_both_and_keeps_their_turns_apart(
    play: Play, model: Any, tokenizer: Any, pairs: dict[str, str]
) -> None:
    other = copy.deepcopy(model)
    other.lm_head.weight.data = torch.roll(other.lm_head.weight.data, 1, 0)
    told = reply(other, tokenizer, [{"role": "user", "content": "Hi"}], Sampling(max_tokens=20)).text
    assert told and told != pairs["Hi"]
    loaded: list[str] = []

    def load(name: str) -> tuple[Any, Any]:
        loaded.append(name)
        return other, tokenizer

    for look in ({"width": 60}, {"width": 140, "force_terminal": True}):
        screen, talk = play("/compare", "/compare base", "Hi", "/undo", "Hi", "/compare", "Hi", load=load, look=look)
        assert "name a model" in screen and "only tiny answers" in screen
        assert screen.count(pairs["Hi"]) >= 2 and "base" in screen and told.strip()[:6] in screen
        assert [q for q, _ in talk.turns] == ["Hi", "Hi"] and talk.turns[0][1] == pairs["Hi"]
    assert loaded == ["base", "base"]


def test_ctrl_c_in_a_comparison_takes_the_question_back_from_both(play: Play, model: Any, tokenizer: Any) -> None:
    other = copy.deepcopy(model)

    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    other.generate = interrupted
    screen, talk = play("/compare base", "Hi", load=lambda _: (other, tokenizer))
    assert "the question is taken back" in screen and talk.turns == []


def test_compare_in_a_script_puts_each_answer_under_its_title(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str], pairs: dict[str, str]
) -> None:
    sampling = Sampling(max_tokens=20)
    chat(Conversation(model, tokenizer, sampling, None), "Hi", Console(), "tuned", lambda _: (model, tokenizer), "base")
    assert capsys.readouterr() == (f"== tuned\n{pairs['Hi']}\n== base\n{pairs['Hi']}\n", "")


def test_unknown_command_gives_a_hint_and_help_lists_them(play: Play) -> None:
    screen, talk = play("/rest", "/xyzzy", "/help")
    assert "did you mean /reset?" in screen and "there is no command /xyzzy; /help lists them" in screen
    assert all(command in screen for command in ("/system", "/retry", "/undo", "/save", "/set", "/quit"))
    assert talk.turns == []


def test_leaving_takes_two_ctrl_c_in_a_row_or_ctrl_d(play: Play) -> None:
    stop = KeyboardInterrupt
    screen, talk = play(stop, "Hi", stop, "Draw", stop, stop)  # play() checks that it left at the last key only
    assert len(talk.turns) == 2 and screen.count("Ctrl-C again leaves") == 3
    play(EOFError)


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupting(console: Console, text: str) -> None:
        console.out(text, end="", highlight=False)
        if text == " there":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_module, "_write", interrupting)
    screen, talk = play("Hi", SKY)
    assert talk.turns == [("Hi", "Hello there"), (SKY, talk.turns[1][1])]
    assert "Hello there\n3 tokens" in screen and " · stopped" in screen


def test_ctrl_c_before_the_first_word_takes_the_question_back(play: Play, model: Any) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    generate, model.generate = model.generate, interrupted
    screen, talk = play("Hi")
    model.generate = generate
    assert "question is taken back" in screen and talk.turns == []


def test_a_full_context_drops_the_oldest_turns_and_says_so(play: Play, tmp_path: Path) -> None:
    screen, talk = play("Hi", SKY, CAT, SKY, f"/save {tmp_path / 'c.jsonl'}")
    assert "the context of 128 tokens is full: the oldest turn" in screen
    assert talk.first_seen > 0 and len(talk.turns) == 4
    saved = json.loads((tmp_path / "c.jsonl").read_text())
    assert len(saved["messages"]) == 8  # saved are also the turns that the model no longer sees
    assert play("Hi", SKY, CAT, SKY, "/reset")[1].first_seen == 0


def test_a_question_beyond_the_context_is_refused_and_the_chat_goes_on(play: Play, pairs: dict[str, str]) -> None:
    screen, talk = play("Hi", LONG, "/undo", "Hi")
    assert "does not fit in the model's context" in screen
    assert talk.turns == [("Hi", pairs["Hi"])]
    screen, talk = play("Hi", LONG)
    assert talk.first_seen == 0 and "no longer seen" not in screen  # the refused question pushed nothing out


def test_escape_codes_do_not_reach_the_terminal(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "reply", lambda *given: (given[4]("\x1b[2J"), reply(*given))[1])
    assert "\x1b" not in play("Hi")[0]


def test_save_appends_lines_of_chat_jsonl(play: Play, tmp_path: Path, pairs: dict[str, str]) -> None:
    path = tmp_path / "talk.jsonl"
    screen, _ = play(f"/save {path}", "Draw", "/save", "/system be brief", f"/save {path}")
    assert "nothing to save" in screen and "name a file" in screen
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # as an editor may leave it
    play("Hi", f"/save {path}")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    turn = [{"role": "user", "content": "Draw"}, {"role": "assistant", "content": pairs["Draw"]}]
    assert rows[0] == {"messages": [{"role": "system", "content": "be brief"}, *turn]}
    assert [m["content"] for m in rows[1]["messages"]] == ["Hi", pairs["Hi"]] and len(rows) == 2


@pytest.mark.parametrize("content", [b"# Notes\n", b"\x93\x00\xff\xfe" * 99, b'{"lr": 1}\n', b"[1]\n", b"\nx"])
def test_save_leaves_other_files_alone(play: Play, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    screen, _ = play("Hi", f"/save {path}", "Hi")
    assert "is no chat JSONL file" in screen and path.read_bytes() == content


def test_save_explains_what_it_cannot_write(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "c.jsonl"):
        with pytest.raises(UserError):
            append_chat_row(path, [])
    (tmp_path / "empty").touch()
    append_chat_row(tmp_path / "empty", [])
    assert (tmp_path / "empty").read_text() == '{"messages": []}\n'


def run_script(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str], prompt: str | None, **given: Any
) -> tuple[str, str]:
    chat(Conversation(model, tokenizer, Sampling(**{"max_tokens": 20, **given}), None), prompt, Console(), "tiny")
    return capsys.readouterr()


def test_prompt_mode_prints_the_answer_only(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str], pairs: dict[str, str]
) -> None:
    assert run_script(model, tokenizer, capsys, "Draw") == (pairs["Draw"] + "\n", "")
    out, err = run_script(model, tokenizer, capsys, "Hi", max_tokens=2)
    assert out == "Hello\n" and "cut at max_tokens=2" in err
    with pytest.raises(UserError, match="is empty"):
        run_script(model, tokenizer, capsys, " ")
    with pytest.raises(UserError, match="context"):
        run_script(model, tokenizer, capsys, LONG)


def test_each_line_of_a_piped_stdin_is_a_turn(
    model: Any,
    tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pairs: dict[str, str],
) -> None:
    counts: list[int] = []

    def counting(model: Any, tokenizer: Any, messages: Any, *rest: Any) -> Any:
        counts.append(len(messages))
        return reply(model, tokenizer, messages, *rest)

    monkeypatch.setattr(chat_module, "reply", counting)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\n  \nHi\r\n"))
    out, err = run_script(model, tokenizer, capsys, None)
    assert out.splitlines()[0] == pairs["Hi"] and counts == [1, 3] and err == ""


def test_without_a_template_it_is_said_once_and_not_on_stdout(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    tokenizer.chat_template = None
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nHi\n"))
    out, err = run_script(model, tokenizer, capsys, None)
    assert err.count("no chat template") == 1 and "template" not in out
    assert play("Hi", SKY)[0].count("no chat template") == 1


def test_ctrl_c_ends_a_script(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_write", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted) as caught:
        chat(Conversation(model, tokenizer, Sampling(), None), "Hi", Console(file=io.StringIO()), "tiny")
    assert caught.value.exit_code == 130


def test_broken_text_on_stdin_is_explained(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    with pytest.raises(UserError, match="UTF-8"):
        chat(Conversation(model, tokenizer, Sampling(), None), None, Console(file=io.StringIO()), "tiny")


def test_a_terminal_gets_the_interactive_chat(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, pairs: dict[str, str]
) -> None:
    terminal = io.StringIO("Hi\n/quit\nnot read\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    screen = io.StringIO()
    chat(Conversation(model, tokenizer, Sampling(), None), None, Console(file=screen, width=200), "tiny model")
    assert screen.getvalue().startswith("tiny model\n") and pairs["Hi"] in screen.getvalue()
    assert terminal.read() == "not read\n"
