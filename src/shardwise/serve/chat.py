"""Chat with a model: interactive on a terminal, and plain question and answer for scripts.

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
    conversation: Conversation,
    prompt: str | None,
    console: Console,
    title: str,
    load: Loader | None = None,
    compare: str | None = None,
) -> None:
    """Answers `prompt`, or each line of a piped stdin, or else opens an interactive chat on the terminal.

    `compare` names a model that answers the same questions; `load` loads it.
    """
    both = {title: conversation}
    if compare is not None and load is not None:
        other = Conversation(*load(compare), conversation.sampling, conversation.system)
        both[other_title(compare, title)] = other
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
    questions_asked: int = 0

    def ask(self, question: str, on_text: Callable[[str], None], note: Callable[[str], None]) -> Reply:
        """Answers a question and stores the turn; an answer stopped before its first word leaves no turn."""
        question = question.encode("utf-8", "replace").decode("utf-8")  # half characters from odd terminals
        messages = self._fit(question, note)
        sampling = self.sampling
        if sampling.seed is not None:
            # A session repeats exactly, yet /retry draws anew.
            sampling = dataclasses.replace(sampling, seed=(sampling.seed + self.questions_asked) % 2**63)
        answer = reply(self.model, self.tokenizer, messages, sampling, on_text)
        self.questions_asked += 1
        if answer.text or answer.ended != "interrupted":
            self.turns.append((question, answer.text))
        return answer

    def messages(self, turns: Iterable[tuple[str, str]]) -> list[Message]:
        """Returns the system message and the given turns, as chat templates and chat files have them."""
        out: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in turns:
            out += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return out

    def undo(self) -> tuple[str, str] | None:
        """Removes the last turn and returns it."""
        turn = self.turns.pop() if self.turns else None
        self.first_seen = min(self.first_seen, len(self.turns))
        return turn

    def reset(self) -> None:
        """Removes every turn."""
        self.turns.clear()
        self.first_seen = 0

    def _fit(self, question: str, note: Callable[[str], None]) -> list[Message]:
        """The messages to send, without the oldest turns where they leave no room for an answer."""
        context = context_length(self.model)
        first_turn = self.first_seen
        while True:
            messages = [*self.messages(self.turns[first_turn:]), {"role": "user", "content": question}]
            if context is None or not self.tokenizer.chat_template:
                return messages
            size = len(prompt_ids(self.tokenizer, messages))
            # A prompt that fits with a word to spare is no use: up to a quarter of the context is the answer's.
            if first_turn == len(self.turns) or size + min(self.sampling.max_tokens, context // 4) <= context:
                break
            first_turn += 1
        # A question too long even alone will be refused, and is no reason to forget the turns before it.
        if size < context and (dropped := first_turn - self.first_seen):
            self.first_seen = first_turn
            dropped_note = "the oldest turn is" if dropped == 1 else f"the {dropped} oldest turns are"
            note(f"the context of {context} tokens is full: {dropped_note} no longer seen by the model")
        return messages


def answer_script(conversations: dict[str, Conversation], questions: Iterable[str], console: Console) -> None:
    """Writes only the answers to `console`; notes go to stderr, and Ctrl-C ends it.

    With several models, each answer stands under the model's title.
    """

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    if any(not conversation.tokenizer.chat_template for conversation in conversations.values()):
        note(NO_TEMPLATE)
    try:
        for line in questions:
            question = line.rstrip("\r\n")
            if not question.strip():  # blank lines on stdin are layout
                continue
            for title, conversation in conversations.items():
                if len(conversations) > 1:
                    _write(console, f"== {title}\n")
                answer = conversation.ask(question, lambda text: _write(console, text), note)
                _finish_line(console, answer.text)
                if answer.ended == "interrupted":
                    raise KeyboardInterrupt
                if ending := _ending(answer, conversation.sampling, "raise max_tokens"):
                    note(ending)
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
        """Runs until /quit, Ctrl-D or two Ctrl-C in a row."""
        self.both = self.both or {title: self.conversation}
        self.console.print(" and ".join(self.both), style="bold", markup=False, highlight=False)
        self._note("/help lists the commands, Ctrl-D leaves")
        if any(not conversation.tokenizer.chat_template for conversation in self.both.values()):
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
                if not self._handle_line(line):
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

    def _handle_line(self, line: str) -> bool:
        """Answers a question or runs a command; returns False if the command was to leave."""
        if not line.startswith("/"):
            if line.strip():
                self._ask(line.strip())
            return True
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._note(HELP),
            "/system": lambda: self._system(argument),
            "/reset": self._reset,
            "/retry": self._retry,
            "/undo": self._undo,
            "/save": lambda: self._save(argument),
            "/load": lambda: self._load(argument),
            "/set": lambda: self._set(argument),
            "/compare": lambda: self._compare(argument),
            "/tokens": self._tokens,
        }
        if name in commands:
            commands[name]()
        elif name not in ("/quit", "/exit"):
            close_matches = difflib.get_close_matches(name, [*commands, "/quit"], n=1)
            suggestion = f"did you mean {close_matches[0]}? " if close_matches else ""
            self._note(f"there is no command {name}; {suggestion}/help lists them")
        return name not in ("/quit", "/exit")

    def _ask(self, question: str) -> bool:
        """Streams an answer and its summary line; returns False if it was stopped before the first word."""
        if len(self.both) > 1:
            return self._ask_all(question)
        answer = self.conversation.ask(question, self._stream, self._note)
        _finish_line(self.console, answer.text)
        if not answer.text and answer.ended == "interrupted":
            self._note("stopped before the first word; the question is taken back")
            return False
        self._note(self._summary(answer))
        return True

    def _ask_all(self, question: str) -> bool:
        """Shows the answers of both models; an interrupt removes the question from both."""
        turn_counts = [len(conversation.turns) for conversation in self.both.values()]
        asks = {
            title: partial(conversation.ask, question, note=self._note) for title, conversation in self.both.items()
        }
        complete = False
        try:
            answers = show_answers(self.console, asks, self._summary, self._note)
            interrupted = any(answer.ended == "interrupted" for answer in answers)
            complete = not interrupted and len(answers) == len(asks)
        finally:
            if not complete:
                for conversation, size in zip(self.both.values(), turn_counts, strict=True):
                    if len(conversation.turns) > size:
                        conversation.undo()
        if not complete:
            self._note("stopped; the question is taken back")
        return complete

    def _summary(self, answer: Reply) -> str:
        sampling = self.conversation.sampling
        rate = answer.tokens / max(answer.seconds, 1e-9)
        ending = _ending(answer, sampling, f"/set max_tokens={2 * sampling.max_tokens}")
        return f"{answer.tokens} tokens · {rate:.1f} tokens/s" + (f" · {ending}" if ending else "")

    def _stream(self, text: str) -> None:
        _write(self.console, harmless(text))

    def _system(self, text: str) -> None:
        for conversation in self.both.values():
            conversation.system = text or None
        self._note("the system message is set" if text else "the system message is removed")

    def _reset(self) -> None:
        for conversation in self.both.values():
            conversation.reset()
        self._note("the conversation is forgotten")

    def _undo(self) -> None:
        turn, *_ = [conversation.undo() for conversation in self.both.values()]
        self._note("there is nothing to take back" if turn is None else f"taken back: {turn[0]}")

    def _retry(self) -> None:
        previous = {conversation: (conversation.first_seen, conversation.undo()) for conversation in self.both.values()}
        turn = previous[self.conversation][1]
        if turn is None:
            self._note("there is no question to answer again")
            return
        if self.conversation.sampling.temperature == 0:
            self._note("temperature is 0, so the same answer comes again; try /set temperature 0.7")
        before = len(self.conversation.turns)
        answered = False
        try:
            answered = self._ask(turn[0])
        finally:
            if not answered and len(self.conversation.turns) == before:  # the old answer is better than none
                for conversation, (first_seen, old) in previous.items():
                    conversation.turns += [] if old is None else [old]
                    conversation.first_seen = first_seen

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
        for conversation in self.both.values():
            conversation.reset()
            conversation.system = system
            conversation.turns = list(turns)
        self._note(
            f"{len(turns)} turn{'' if len(turns) == 1 else 's'} loaded" + (", and a system message" * bool(system))
        )

    def _set(self, text: str) -> None:
        words = text.split()
        if words and "=" not in text and len(words) % 2 == 0:
            words = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        if words:
            sampling = changed(self.conversation.sampling, words)
            for conversation in self.both.values():
                conversation.sampling = sampling
        settings = dataclasses.asdict(self.conversation.sampling)
        self._note(" ".join(f"{name}={value}" for name, value in settings.items()))

    def _compare(self, name: str) -> None:
        title = next(iter(self.both))
        if name and self.load is not None:
            self._note(f"loading {name}")
            conversation = self.conversation
            other = Conversation(
                *self.load(name),
                conversation.sampling,
                conversation.system,
                list(conversation.turns),
                conversation.first_seen,
            )
            self.both = {title: conversation, other_title(name, title): other}
            self._note("both answer from now on; /compare alone ends it")
        elif len(self.both) > 1:
            self.both = {title: self.conversation}
            self._note(f"only {title} answers from now on")
        else:
            self._note("name a model: /compare MODEL")

    def _tokens(self) -> None:
        for title, conversation in self.both.items():
            messages = conversation.messages(conversation.turns[conversation.first_seen :])
            used = (
                len(prompt_ids(conversation.tokenizer, messages))
                if messages and conversation.tokenizer.chat_template
                else 0
            )
            context = context_length(conversation.model)
            name = f"{title}: " if len(self.both) > 1 else ""
            self._note(f"{name}{used} tokens" + ("" if context is None else f" of {context}, {context - used} left"))

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def changed(sampling: Sampling, assignments: list[str]) -> Sampling:
    """Returns the sampling settings with `name=value` assignments; a UserError names the nearest setting."""
    values: dict[str, Any] = dataclasses.asdict(sampling)
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in values:
            close_matches = difflib.get_close_matches(name, values, n=1) or list(values)
            raise UserError("/set", assignment, "is no setting", f"settings: {', '.join(close_matches)}")
        is_integer = name in ("max_tokens", "seed")
        try:
            number = int if is_integer else float
            values[name] = None if name == "seed" and text == "None" else number(text)
        except ValueError:
            example = f"{name}=7" if is_integer else f"{name}=0.7"
            raise UserError("/set", assignment, "is not a number", f"write e.g. /set {example}") from None
    return Sampling(**values)


def _ending(answer: Reply, sampling: Sampling, remedy: str) -> str:
    """Why an answer was cut short; empty if it was not."""
    return {
        "stop": "",
        "length": f"cut at max_tokens={sampling.max_tokens} ({remedy})",
        "context": "cut where the context ends",
        "interrupted": "stopped",
    }[answer.ended]


def _write(console: Console, text: str) -> None:
    console.out(text, end="", highlight=False)


def _finish_line(console: Console, text: str) -> None:
    if not text.endswith("\n"):
        _write(console, "\n")
