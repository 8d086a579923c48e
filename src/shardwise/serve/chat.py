"""A terminal around a model: an interactive chat for people, and a plain question-and-answer mode for scripts.

People get streaming, commands and notes. Scripts (a prompt, or lines on stdin) get the answers on stdout and nothing
else; notes go to stderr. Both share one `Conversation`, which holds the turns and keeps them within the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.errors import Interrupted, UserError
from shardwise.serve.generate import NO_TEMPLATE, Message, Reply, Sampling, context_length, prompt_ids, reply

HELP = """\
/system TEXT         set the system message; without TEXT, remove it
/reset               forget the conversation, keep the system message
/retry               answer the last question again
/undo                take back the last question and its answer
/save FILE           append the conversation to FILE as one line of chat JSONL
/set NAME=VALUE      e.g. /set temperature=0.7 seed=1; alone it shows the settings
/quit                leave (or Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer. A line that ends in \\ goes on. Start with a blank to send a line that begins with /."""

_COMMANDS = ("/help", "/system", "/reset", "/retry", "/undo", "/save", "/set", "/quit")


def chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    system: str | None,
    prompt: str | None,
    console: Console,
    title: str,
) -> None:
    """Answers `prompt`, or each line of a piped stdin, or else opens an interactive chat on the terminal."""
    conversation = Conversation(model, tokenizer, sampling, system)
    if prompt is not None:
        if not prompt.strip():
            raise UserError("prompt", prompt, "is empty", "write a question")
        answer_script(conversation, [prompt], console)
    elif not sys.stdin.isatty():
        answer_script(conversation, sys.stdin, console)
    else:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # its mere import gives input() line editing and a history
        Terminal(conversation, console).run(title)


@dataclass
class Conversation:
    """The turns so far, and which of them the model still sees."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    first_seen: int = 0
    asked: int = 0

    def ask(self, question: str, on_text: Callable[[str], None], note: Callable[[str], None]) -> Reply:
        """Answers a question and keeps the turn; an answer stopped before its first word leaves no turn."""
        question = question.encode("utf-8", "replace").decode("utf-8")  # half characters from odd terminals
        messages = self._fit(question, note)
        sampling = self.sampling
        if sampling.seed is not None:
            # A session repeats exactly, yet /retry draws anew.
            sampling = dataclasses.replace(sampling, seed=(sampling.seed + self.asked) % 2**63)
        given = reply(self.model, self.tokenizer, messages, sampling, on_text)
        self.asked += 1
        if given.text or given.ended != "interrupted":
            self.turns.append((question, given.text))
        return given

    def messages(self, turns: Iterable[tuple[str, str]]) -> list[Message]:
        """The system message and the given turns in the form that templates and chat files share."""
        out: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in turns:
            out += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return out

    def undo(self) -> tuple[str, str] | None:
        """Takes back the last turn and returns it."""
        turn = self.turns.pop() if self.turns else None
        self.first_seen = min(self.first_seen, len(self.turns))
        return turn

    def reset(self) -> None:
        """Forgets every turn."""
        self.turns.clear()
        self.first_seen = 0

    def _fit(self, question: str, note: Callable[[str], None]) -> list[Message]:
        """The messages to send, without the oldest turns where they leave no room for an answer."""
        context, first = context_length(self.model), self.first_seen
        while True:
            messages = [*self.messages(self.turns[first:]), {"role": "user", "content": question}]
            if context is None or not self.tokenizer.chat_template:
                return messages
            size = len(prompt_ids(self.tokenizer, messages))
            # A prompt that fits with a word to spare is no use: up to a quarter of the context is the answer's.
            if first == len(self.turns) or size + min(self.sampling.max_tokens, context // 4) <= context:
                break
            first += 1
        # A question too long even alone will be refused, and is no reason to forget the turns before it.
        if size < context and (dropped := first - self.first_seen):
            self.first_seen = first
            which = "the oldest turn is" if dropped == 1 else f"the {dropped} oldest turns are"
            note(f"the context of {context} tokens is full: {which} no longer seen by the model")
        return messages


def answer_script(conversation: Conversation, questions: Iterable[str], console: Console) -> None:
    """Writes the answer to each question to `console` and nothing else; notes go to stderr, Ctrl-C ends it."""

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    if not conversation.tokenizer.chat_template:
        note(NO_TEMPLATE)
    try:
        for line in questions:
            question = line.rstrip("\r\n")
            if not question.strip():  # blank lines on stdin are layout
                continue
            given = conversation.ask(question, lambda text: _write(console, text), note)
            _finish_line(console, given.text)
            if given.ended == "interrupted":
                raise KeyboardInterrupt
            if shown := _ending(given, conversation.sampling, "raise max_tokens"):
                note(shown)
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C", 130) from None
    except UnicodeDecodeError as error:
        raise UserError("stdin", None, f"is not UTF-8 text ({error.reason})", "convert it to UTF-8") from None


@dataclass
class Terminal:
    """The interactive chat: reads lines, runs commands, streams answers."""

    conversation: Conversation
    console: Console
    read: Callable[[str], str] = input

    def run(self, title: str) -> None:
        """Talks until /quit, Ctrl-D or two Ctrl-C in a row."""
        self.console.print(title, style="bold", markup=False, highlight=False)
        self._note("/help lists the commands, Ctrl-D leaves")
        if not self.conversation.tokenizer.chat_template:
            self._note(NO_TEMPLATE)
        interrupts = 0
        while interrupts < 2:
            try:
                line = self._read_line()
            except EOFError:
                _write(self.console, "\n")
                return
            except KeyboardInterrupt:
                interrupts += 1
                _write(self.console, "\n")
                if interrupts == 1:
                    self._note("Ctrl-C again leaves, and so does Ctrl-D")
                continue
            except UnicodeDecodeError:
                self._note("that line is not UTF-8 text")
                continue
            interrupts = 0
            try:
                if not self._take(line):
                    return
            except UserError as error:
                self.console.print(str(error), style="yellow", markup=False, highlight=False)
            except KeyboardInterrupt:
                self._note("stopped")

    def _read_line(self) -> str:
        line = self.read("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self.read(". ")
        return line

    def _take(self, line: str) -> bool:
        """Answers a question or runs a command; False where the command was to leave."""
        if not line.startswith("/"):
            if line.strip():
                self._ask(line.strip())
            return True
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._note(HELP),
            "/system": lambda: self._system(rest),
            "/reset": self._reset,
            "/retry": self._retry,
            "/undo": self._undo,
            "/save": lambda: self._save(rest),
            "/set": lambda: self._set(rest),
        }
        if name in commands:
            commands[name]()
        elif name not in ("/quit", "/exit"):
            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            self._note(f"there is no command {name}; {meant}/help lists them")
        return name not in ("/quit", "/exit")

    def _ask(self, question: str) -> bool:
        """Streams an answer and its dim summary line; False where it was stopped before the first word."""
        given = self.conversation.ask(question, self._stream, self._note)
        _finish_line(self.console, given.text)
        if not given.text and given.ended == "interrupted":
            self._note("stopped before the first word; the question is taken back")
            return False
        rate = given.tokens / max(given.seconds, 1e-9)
        why = _ending(given, self.conversation.sampling, f"/set max_tokens={2 * self.conversation.sampling.max_tokens}")
        self._note(f"{given.tokens} tokens · {rate:.1f} tokens/s" + (f" · {why}" if why else ""))
        return True

    def _stream(self, text: str) -> None:
        _write(self.console, text.replace("\x1b", "␛"))  # escape codes from a model could repaint the terminal

    def _system(self, text: str) -> None:
        self.conversation.system = text or None
        self._note("the system message is set" if text else "the system message is removed")

    def _reset(self) -> None:
        self.conversation.reset()
        self._note("the conversation is forgotten")

    def _undo(self) -> None:
        turn = self.conversation.undo()
        self._note("there is nothing to take back" if turn is None else f"taken back: {turn[0]}")

    def _retry(self) -> None:
        first_seen, turn = self.conversation.first_seen, self.conversation.undo()
        if turn is None:
            self._note("there is no question to answer again")
            return
        if self.conversation.sampling.temperature == 0:
            self._note("temperature is 0, so the same answer comes again; try /set temperature=0.7")
        before, answered = len(self.conversation.turns), False
        try:
            answered = self._ask(turn[0])
        finally:
            if not answered and len(self.conversation.turns) == before:  # the old answer is better than none
                self.conversation.turns.append(turn)
                self.conversation.first_seen = first_seen

    def _save(self, name: str) -> None:
        if not name:
            self._note("name a file: /save FILE.jsonl")
        elif not self.conversation.turns:
            self._note("there is nothing to save yet")
        else:
            path = Path(name).expanduser()
            append_chat_row(path, self.conversation.messages(self.conversation.turns))
            self._note(f"appended to {path}")

    def _set(self, text: str) -> None:
        if text:
            self.conversation.sampling = changed(self.conversation.sampling, text.split())
        settings = dataclasses.asdict(self.conversation.sampling)
        self._note(" ".join(f"{name}={value}" for name, value in settings.items()))

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def changed(sampling: Sampling, assignments: list[str]) -> Sampling:
    """The sampling with `name=value` assignments applied; a UserError names the nearest setting."""
    values: dict[str, Any] = dataclasses.asdict(sampling)
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in values:
            near = difflib.get_close_matches(name, values, n=1) or list(values)
            raise UserError("/set", assignment, "is no setting", f"settings: {', '.join(near)}")
        whole = name in ("max_tokens", "seed")
        try:
            values[name] = None if name == "seed" and text == "None" else int(text) if whole else float(text)
        except ValueError:
            form = f"{name}=7" if whole else f"{name}=0.7"
            raise UserError("/set", assignment, "is not a number", f"write e.g. /set {form}") from None
    return Sampling(**values)


def append_chat_row(path: Path, messages: list[Message]) -> None:
    """Appends a conversation to a chat JSONL file, new or existing; any other file is refused untouched."""
    row = json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
    try:
        if path.exists():
            if not (path.is_file() and _holds_chat_rows(path)):
                raise UserError("/save", str(path), "exists and is no chat JSONL file", "choose another name")
            with path.open("rb") as file:
                if file.seek(0, 2) > 0:
                    file.seek(-1, 2)
                    row = row if file.read(1) == b"\n" else b"\n" + row
        with path.open("ab") as file:
            file.write(row)
    except OSError as error:
        raise UserError("/save", str(path), error.strerror or str(error), "choose a file you may write") from None


def _holds_chat_rows(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(2**26)  # a binary file may have no line end at all
    if not first:
        return True
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and "messages" in row


def _ending(given: Reply, sampling: Sampling, remedy: str) -> str:
    """Why an answer is shorter than the model meant it, or nothing."""
    return {
        "stop": "",
        "length": f"cut at max_tokens={sampling.max_tokens} ({remedy})",
        "context": "cut where the context ends",
        "interrupted": "stopped",
    }[given.ended]


def _write(console: Console, text: str) -> None:
    console.out(text, end="", highlight=False)


def _finish_line(console: Console, text: str) -> None:
    if not text.endswith("\n"):
        _write(console, "\n")
