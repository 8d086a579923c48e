"""A terminal around a model: an interactive chat for people, and a plain question-and-answer mode for scripts.

People get streaming, commands and notes. Scripts (a prompt, or lines on stdin) get the answers on stdout and nothing
else; notes go to stderr. Both share one `Conversation`, which holds the turns and keeps them within the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.core.errors import Interrupted, UserError
from shardwise.nn.generate import NO_TEMPLATE, Message, Reply, Sampling, context_length, prompt_ids, reply
from shardwise.serve.compare import harmless, other_title, show_answers
from shardwise.serve.transcript import append_chat_row, read_chat_row

HELP = """\
/system TEXT         set the system message; without TEXT, remove it
/reset               forget the conversation, keep the system message
/retry               answer the last question again
/undo                take back the last question and its answer
/save FILE           append the conversation to FILE as one line of chat JSONL
/load FILE           go on with the last conversation in FILE
/set NAME VALUE      e.g. /set temperature 0.7; alone it shows the settings
/compare MODEL       let another model answer too; without MODEL, no longer
/tokens              how much of the context is used
/quit                leave (or Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer. A line that ends in \\ goes on. Start with a blank to send a line that begins with /."""

Loader = Callable[[str], tuple[Any, Any]]


def chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    system: str | None,
    prompt: str | None,
    console: Console,
    title: str,
    load: Loader | None = None,
    compare: str | None = None,
) -> None:
    """Answers `prompt`, or each line of a piped stdin, or else opens an interactive chat on the terminal.

    `compare` names a model that answers the same questions; `load` finds it.
    """
    conversation = Conversation(model, tokenizer, sampling, system)
    both = {title: conversation}
    if compare is not None and load is not None:
        both[other_title(compare, title)] = Conversation(*load(compare), sampling, system)
    if prompt is not None:
        if not prompt.strip():
            raise UserError("prompt", prompt, "is empty", "write a question")
        answer_script(both, [prompt], console)
    elif not sys.stdin.isatty():
        answer_script(both, sys.stdin, console)
    else:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # its mere import gives input() line editing and a history
        Terminal(conversation, console, load=load, both=both).run(title)


@dataclass(eq=False)
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


def answer_script(conversations: dict[str, Conversation], questions: Iterable[str], console: Console) -> None:
    """Writes the answers to each question to `console` and nothing else; notes go to stderr, Ctrl-C ends it.

    Of several models, each answer stands under the model's title.
    """

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    if any(not one.tokenizer.chat_template for one in conversations.values()):
        note(NO_TEMPLATE)
    try:
        for line in questions:
            question = line.rstrip("\r\n")
            if not question.strip():  # blank lines on stdin are layout
                continue
            for title, conversation in conversations.items():
                if len(conversations) > 1:
                    _write(console, f"== {title}\n")
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
    load: Loader | None = None
    both: dict[str, Conversation] = field(default_factory=dict)  # by title; more than one while models are compared

    def run(self, title: str) -> None:
        """Talks until /quit, Ctrl-D or two Ctrl-C in a row."""
        self.both = self.both or {title: self.conversation}
        self.console.print(" and ".join(self.both), style="bold", markup=False, highlight=False)
        self._note("/help lists the commands, Ctrl-D leaves")
        if any(not one.tokenizer.chat_template for one in self.both.values()):
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
            "/load": lambda: self._load(rest),
            "/set": lambda: self._set(rest),
            "/compare": lambda: self._compare(rest),
            "/tokens": self._tokens,
        }
        if name in commands:
            commands[name]()
        elif name not in ("/quit", "/exit"):
            near = difflib.get_close_matches(name, [*commands, "/quit"], n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            self._note(f"there is no command {name}; {meant}/help lists them")
        return name not in ("/quit", "/exit")

    def _ask(self, question: str) -> bool:
        """Streams an answer and its dim summary line; False where it was stopped before the first word."""
        if len(self.both) > 1:
            return self._ask_both(question)
        given = self.conversation.ask(question, self._stream, self._note)
        _finish_line(self.console, given.text)
        if not given.text and given.ended == "interrupted":
            self._note("stopped before the first word; the question is taken back")
            return False
        self._note(self._summary(given))
        return True

    def _ask_both(self, question: str) -> bool:
        """Shows the answers of both models; an interrupt takes the question back from both."""
        before = [len(one.turns) for one in self.both.values()]
        asks = {title: partial(one.ask, question, note=self._note) for title, one in self.both.items()}
        whole = False
        try:
            given = show_answers(self.console, asks, self._summary, self._note)
            whole = all(one.ended != "interrupted" for one in given) and len(given) == len(asks)
        finally:
            if not whole:
                for one, size in zip(self.both.values(), before, strict=True):
                    if len(one.turns) > size:
                        one.undo()
        if not whole:
            self._note("stopped; the question is taken back")
        return whole

    def _summary(self, given: Reply) -> str:
        sampling, rate = self.conversation.sampling, given.tokens / max(given.seconds, 1e-9)
        why = _ending(given, sampling, f"/set max_tokens={2 * sampling.max_tokens}")
        return f"{given.tokens} tokens · {rate:.1f} tokens/s" + (f" · {why}" if why else "")

    def _stream(self, text: str) -> None:
        _write(self.console, harmless(text))

    def _system(self, text: str) -> None:
        for one in self.both.values():
            one.system = text or None
        self._note("the system message is set" if text else "the system message is removed")

    def _reset(self) -> None:
        for one in self.both.values():
            one.reset()
        self._note("the conversation is forgotten")

    def _undo(self) -> None:
        turn, *_ = [one.undo() for one in self.both.values()]
        self._note("there is nothing to take back" if turn is None else f"taken back: {turn[0]}")

    def _retry(self) -> None:
        kept = {one: (one.first_seen, one.undo()) for one in self.both.values()}
        turn = kept[self.conversation][1]
        if turn is None:
            self._note("there is no question to answer again")
            return
        if self.conversation.sampling.temperature == 0:
            self._note("temperature is 0, so the same answer comes again; try /set temperature 0.7")
        before, answered = len(self.conversation.turns), False
        try:
            answered = self._ask(turn[0])
        finally:
            if not answered and len(self.conversation.turns) == before:  # the old answer is better than none
                for one, (first_seen, old) in kept.items():
                    one.turns += [] if old is None else [old]
                    one.first_seen = first_seen

    def _save(self, name: str) -> None:
        if not name:
            self._note("name a file: /save FILE.jsonl")
        elif not self.conversation.turns:
            self._note("there is nothing to save yet")
        else:
            path = Path(name).expanduser()
            append_chat_row(path, self.conversation.messages(self.conversation.turns))
            self._note(f"appended to {path}")

    def _load(self, name: str) -> None:
        if not name:
            self._note("name a file: /load FILE.jsonl")
            return
        system, turns = read_chat_row(Path(name).expanduser())
        for one in self.both.values():
            one.reset()
            one.system, one.turns = system, list(turns)
        self._note(
            f"{len(turns)} turn{'' if len(turns) == 1 else 's'} loaded" + (", and a system message" * bool(system))
        )

    def _set(self, text: str) -> None:
        words = text.split()
        if words and "=" not in text and len(words) % 2 == 0:
            words = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        if words:
            sampling = changed(self.conversation.sampling, words)
            for one in self.both.values():
                one.sampling = sampling
        settings = dataclasses.asdict(self.conversation.sampling)
        self._note(" ".join(f"{name}={value}" for name, value in settings.items()))

    def _compare(self, name: str) -> None:
        title = next(iter(self.both))
        if name and self.load is not None:
            self._note(f"loading {name}")
            talk = self.conversation
            other = Conversation(*self.load(name), talk.sampling, talk.system, list(talk.turns), talk.first_seen)
            self.both = {title: talk, other_title(name, title): other}
            self._note("both answer from now on; /compare alone ends it")
        elif len(self.both) > 1:
            self.both = {title: self.conversation}
            self._note(f"only {title} answers from now on")
        else:
            self._note("name a model: /compare MODEL")

    def _tokens(self) -> None:
        for title, one in self.both.items():
            seen = one.messages(one.turns[one.first_seen :])
            used = len(prompt_ids(one.tokenizer, seen)) if seen and one.tokenizer.chat_template else 0
            context = context_length(one.model)
            name = f"{title}: " if len(self.both) > 1 else ""
            self._note(f"{name}{used} tokens" + ("" if context is None else f" of {context}, {context - used} left"))

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
