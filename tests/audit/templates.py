"""Every chat template that can be had, by every shape of conversation, tokenised both ways: right, refused or wrong.

    PYTHONPATH=src:tests python -m audit.templates [--only PART_OF_A_NAME] [--list refused|wrong]

What is right does not come from the code that is audited: the rendering, the prompts and the places of the words are
worked out here with transformers alone, and how each family ends its turns is written down by hand (families.py).
  right     every word of the wanted answers is trained on, with all that ends them, from right behind the prompt on;
            nothing of other roles, no marker of another turn; the quick way equals the search
  refused   with a reason
  wrong     anything else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from audit.conversations import Message, Shape, shapes
from audit.families import Family, family_of, own_family, own_names, squashed
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Example
from shardwise.data.render import Renderer

MODES = ("special", "plain")  # the family's special tokens as such; the tokenizer has eos and bos alone
WAYS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": False})
WORD = re.compile(r"zq\d+v")
TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z|]{3,20}\]")
FORCED = re.compile(r"(<[^<>]*>|\[THINK\]|Herearemyreasoningsteps:|thought|Let'sthinkstepbystep\.)*")
# A template is right in chat if these are; what else it is right in shows in the counts.
BASIC = {"single": ("one answer",), "multi": ("two answers", "three answers", "eight answers"), "tools": ("call",)}


@dataclass(frozen=True)
class Verdict:
    """What became of one conversation under one template."""

    template: str
    mode: str
    shape: str
    kind: str
    verdict: str  # right, refused, wrong; unwritable: the template itself raises
    reason: str = ""


class Wrong(Exception):
    """What is wrong with a mask."""


@lru_cache
def _base() -> str:
    """A byte-level tokenizer some of whose tokens reach over the edges of markers that are plain text."""
    from support.tiny import PAIRS
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = [m["content"] for line in PAIRS.read_text().splitlines() for m in json.loads(line)["messages"]]
    marks = [
        "word.<|im_end|><|im_start|>user<|end|><|user|>!</user><user>[/INST] </s>",
        "x|><|y ### Instruction: a\n### b",
    ]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    raw.train_from_iterator([*words, *marks * 200], trainer)
    return str(raw.to_str())


def tokenizer_for(family: Family, template: str, mode: str) -> Any:
    """The family's tokens, or none but bos and eos, over one small vocabulary."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = mode == "special"
    bos, eos = (family.bos, family.eos) if special else ("<s>", "</s>")
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_base()), bos_token=bos, eos_token=eos)
    if special:
        fast.add_tokens([AddedToken(w, special=False, normalized=False) for w in family.words])
        fast.add_special_tokens({"additional_special_tokens": list(family.special)})
    fast.chat_template = template
    return fast


# --- judging -----------------------------------------------------------------------------------------------------


class Judge:
    """Holds what the code says of conversations under one template to what is known of its family."""

    def __init__(self, name: str, template: str, mode: str, family: Family) -> None:
        self.name, self.mode, self.family = name, mode, family
        self.tokenizer = tokenizer_for(self.family, template, mode)
        stops = self.family.stops if mode == "special" else ()
        with patch("shardwise.data.encode.PROBES", 20):  # the tokens are compared with the tokenizer's own all the same
            self.renderer = Renderer(self.tokenizer, "assistant", "data.train.0", stops=stops)

    def __call__(self, shape: Shape) -> Verdict:
        """The verdict on one conversation."""
        known = (self.name, self.mode, shape.name, shape.kind)
        texts = dict.fromkeys(self._texts(shape.messages, shape.tools))
        if not texts:
            return Verdict(*known, "unwritable")
        self.renderer.loss_on = shape.loss_on
        example = Example("row", 0, "chat", shape.messages, shape.tools, shape.weights)
        try:
            (document,) = self.renderer.render([example])
        except UserError as error:
            return Verdict(*known, "refused", error.problem)
        if isinstance(document, BadRow):
            return Verdict(*known, "refused", document.problem)
        try:
            self._check(shape, list(texts), document)
            self._check_quick(shape)
        except Wrong as wrong:
            return Verdict(*known, "wrong", str(wrong))
        return Verdict(*known, "right")

    def _check(self, shape: Shape, texts: list[str], document: Any) -> None:
        wanted = self._wanted(shape)
        endings: dict[int, list[str]] = {}
        for index in wanted:
            if (possible := self.family.endings(shape.messages, index, self.mode)) is None:
                raise Wrong("trained on, though no end of turn can be taught")
            endings[index] = possible
        text, offsets = self._text_of(texts, document.tokens.tolist(), endings[wanted[-1]] if wanted else [])
        runs = list(_runs(document.learned))
        places = [(offsets[a][0], offsets[b - 1][1]) for a, b in runs]
        wanted = [
            i for i in wanted if any(endings[i]) or shape.messages[i]["content"] or shape.messages[i].get("tool_calls")
        ]
        allowed = {w for i in wanted for w in WORD.findall(json.dumps(shape.messages[i], ensure_ascii=False))}
        for begin, end in places:
            if others := set(WORD.findall(text[begin:end])) - allowed:
                raise Wrong(f"trains on another's words {sorted(others)}")
        groups = self._grouped(wanted, len(places), shape.messages)
        for (first, last), group in zip(runs, groups, strict=True):
            self._check_run(text, _edges(text, offsets, first, last), group, shape, endings)
        if wanted and wanted[-1] == len(shape.messages) - 1:
            ids = document.tokens[runs[-1][0] : runs[-1][1]].tolist()
            stops = {self.tokenizer.eos_token, *(self.family.stops if self.mode == "special" else ())}
            if not any(self.tokenizer.convert_tokens_to_ids(s) in ids for s in stops):
                raise Wrong(f"the last turn has no token that generation stops at (its end is {endings[wanted[-1]]})")

    def _wanted(self, shape: Shape) -> list[int]:
        answers = [i for i, m in enumerate(shape.messages) if m["role"] == "assistant"]
        chosen = answers if shape.loss_on == "assistant" else answers[-1:]
        weights = shape.weights or (None,) * len(shape.messages)
        return [i for i, w in enumerate(weights) if (i in chosen if w is None else w)]

    def _grouped(self, wanted: list[int], count: int, messages: Sequence[Message]) -> list[list[int]]:
        """Which answers each run of trained tokens holds: one, or answers in a row that nothing parts."""
        if count == len(wanted):
            return [[i] for i in wanted]
        groups: list[list[int]] = []
        for index in wanted:
            if groups and groups[-1][-1] == index - 1 and messages[index - 1]["role"] == "assistant":
                groups[-1].append(index)
            else:
                groups.append([index])
        if count != len(groups):
            raise Wrong(f"{count} runs of trained tokens for {len(wanted)} answers")
        return groups

    def _check_run(
        self, text: str, edges: list[tuple[int, int]], group: list[int], shape: Shape, endings: dict[int, list[str]]
    ) -> None:
        """Checks a run of trained tokens; `edges` are where it may be said to begin and end."""
        problems = []
        for begin, end in edges:
            try:
                self._check_words(text[begin:end], group, shape, endings)
                self._check_begin(text[:begin], group[0], shape)
                return
            except Wrong as wrong:
                problems.append(wrong)
        raise problems[0]

    def _check_words(self, run: str, group: list[int], shape: Shape, endings: dict[int, list[str]]) -> None:
        rest = squashed(run)
        own = squashed(json.dumps([shape.messages[i] for i in group], ensure_ascii=False))
        for opens in map(squashed, self.family.opens):
            if rest.count(opens) > own.count(opens):
                raise Wrong(f"trains on {opens!r}, which opens a turn: {run[-120:]!r}")
        for at in reversed(range(len(group))):
            index = group[at]
            before = (
                [squashed(shape.messages[group[at - 1]]["content"] + e) for e in endings[group[at - 1]]] if at else []
            )
            rest = self._without(rest, shape.messages[index], endings[index], before, run)
        if rest:
            raise Wrong(f"trains on {rest[:60]!r} before the answer: {run[:120]!r}")

    def _without(self, rest: str, message: Message, endings: list[str], before: list[str], run: str) -> str:
        """What is left of a run before this answer, or after the one `before` in it; blanks do not count."""
        possible = sorted(map(squashed, endings), key=len, reverse=True)
        ending = next((e for e in possible if rest.endswith(e)), None)
        if ending is None:
            raise Wrong(f"does not end with {endings}: …{run[-100:]!r}")
        rest = rest.removesuffix(ending)
        if message.get("tool_calls"):
            written = WORD.findall(json.dumps(message["tool_calls"])) + WORD.findall(message["content"] or "")
            if missing := [w for w in written if w not in rest]:
                raise Wrong(f"does not train on {missing}: {run!r}")
            return ""
        content = message["content"]
        said = [content, content.removeprefix("<think>\n"), content.rpartition("</think>")[2]]
        words = next((w for w in map(squashed, said) if rest.endswith(w)), None)
        if words is None:
            raise Wrong(f"does not train on all of {content[-60:]!r}: …{run[-100:]!r}")
        rest = rest.removesuffix(words)
        place = max((rest.rfind(b) + len(b) for b in before if b in rest), default=0)
        lead = TAG.sub("", rest[place:].replace(squashed(message.get("reasoning_content", "")), ""))
        for word in self.family.lead:
            lead = lead.replace(word, "")
        return rest[:place] + lead

    def _check_begin(self, before: str, index: int, shape: Shape) -> None:
        tail = _tail(before)
        asked = shape.messages[:index]
        for way in WAYS:
            for prompt in map(_tail, self._texts(asked, shape.tools, True, way)):
                if tail == prompt or (prompt.startswith(tail) and tail and FORCED.fullmatch(prompt[len(tail) :])):
                    return
        header = self._header()
        for unasked in map(_tail, self._texts(asked, shape.tools)):
            if tail.startswith(unasked) and FORCED.fullmatch(header.removeprefix(tail.removeprefix(unasked))):
                return  # nothing asks for an answer here, and the header is not trained on
        raise Wrong(f"does not begin right behind the prompt: …{before[-80:]!r}")

    def _header(self) -> str:
        """What stands between a question and an answer, behind what ends the question."""
        turns = [{"role": "user", "content": "zq0v"}, {"role": "assistant", "content": "zq1v"}]
        asked, ready = (next(self._texts(turns[:1], (), on), "") for on in (False, True))
        if ready != asked and ready.startswith(asked):
            return squashed(ready.removeprefix(asked))
        whole = next(self._texts(turns), "")
        return squashed(whole.partition("zq1v")[0]).removeprefix(squashed(asked)) if whole.startswith(asked) else ""

    def _text_of(self, texts: list[str], ids: list[int], endings: list[str]) -> tuple[str, list[tuple[int, int]]]:
        """The text that was tokenised: a rendering, or one whose last answer is ended."""
        for text in [*texts, *(t + ending for t in texts for ending in endings)]:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            if encoded["input_ids"] == ids:
                return text, encoded["offset_mapping"]
        raise Wrong("the tokens are not those of the rendering")

    def _check_quick(self, shape: Shape) -> None:
        template = self.renderer.template
        text = template.render(shape.messages, shape.tools)
        wanted = tuple(self._wanted(shape))
        if template.mask(text, shape.messages, wanted, shape.tools) != template.search(
            text, shape.messages, wanted, shape.tools
        ):
            raise Wrong("the quick way and the search differ")

    def _texts(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        prompt: bool = False,
        way: dict[str, Any] | None = None,
    ) -> Iterator[str]:
        """The conversation rendered by transformers in each form that messages may have."""
        for form in _forms(messages):
            try:
                yield self.tokenizer.apply_chat_template(
                    form, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt, **(way or {})
                )
            except Exception:  # templates raise whatever they like
                continue


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    calls = any(m.get("tool_calls") for m in messages)
    for as_json in (False, True) if calls else (False,):
        for empty in ("", None) if calls else ("",):
            yield [_formed(m, as_json, empty) for m in messages]
    yield [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _formed(message: Message, as_json: bool, empty: str | None) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if as_json:
        calls = [
            c | {"function": c["function"] | {"arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
            for c in calls
        ]
    return message | {"tool_calls": calls, "content": message["content"] or empty}


def _edges(text: str, offsets: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Where a run of tokens begins and ends; of a token that another turn shares, any part may be its own."""
    begin, end = offsets[first][0], offsets[last - 1][1]
    left = offsets[first - 1] if first else (begin, begin)
    right = offsets[last] if last < len(offsets) else (end, end)
    begins, ends = range(begin, min(left[0], begin - 1), -1), range(end, max(right[1], end + 1))
    return [(b, e) for b in begins for e in ends]


def _tail(text: str) -> str:
    """What stands behind the last word that somebody said."""
    found = list(WORD.finditer(text))
    return squashed(text[found[-1].end() :] if found else text)


def _runs(learned: np.ndarray) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], learned.astype(int), [0]])))
    return ((int(a), int(b)) for a, b in edges.reshape(-1, 2))


# --- all of them -------------------------------------------------------------------------------------------------


def own(*names: str) -> dict[str, str]:
    """Our own templates, written after published ones."""
    from support.templates import FAMILIES as WRITTEN

    return {f"own/{name}": WRITTEN[name].template for name in names or own_names()}


def audit(
    templates: dict[str, str], modes: Iterable[str] = MODES, only: Sequence[Shape] | None = None
) -> list[Verdict]:
    """Every template by every mode and shape."""
    found = []
    for name, text in templates.items():
        family = own_family(name.removeprefix("own/")) if name.startswith("own/") else family_of(name, text)
        for mode in modes:
            found += map(Judge(name, text, mode, family), only or shapes())
    return found


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts of conversations and of templates that are right in chat."""
    lines = []
    templates = len({v.template for v in verdicts})
    for mode in MODES:
        for kind in BASIC:
            some = [v for v in verdicts if v.mode == mode and v.kind == kind]
            counts = Counter(v.verdict for v in some)
            basic = {v.template: True for v in some if v.shape in BASIC[kind]}
            for v in some:
                if v.shape in BASIC[kind] and v.verdict != "right":
                    basic[v.template] = False
            figures = ", ".join(f"{counts[w]:,} {w}" for w in ("right", "refused", "wrong", "unwritable"))
            lines.append(f"{mode:8} {kind:6} {figures}; right under {sum(basic.values())} of {templates} templates")
    return "\n".join(lines)


def main() -> int:
    """Prints the counts, and with --list the reasons; leaves with 1 if anything is wrong."""
    from audit.corpus import templates

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="templates with this in their name")
    parser.add_argument("--list", choices=["refused", "wrong"], action="append", default=[])
    parser.add_argument("--json", help="a file for all verdicts")
    parser.add_argument("--mode", choices=MODES, action="append", default=[])
    arguments = parser.parse_args()
    started = time.monotonic()
    every = own() | templates()
    verdicts = audit({name: text for name, text in every.items() if arguments.only in name}, arguments.mode or MODES)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(v) for v in verdicts], ensure_ascii=False))
    for verdict in verdicts:
        if verdict.verdict in (*arguments.list, "wrong"):
            print(f"{verdict.verdict}: {verdict.template} [{verdict.mode}] {verdict.shape}: {verdict.reason}")
    print(summary(verdicts))
    print(f"{len(verdicts):,} conversations in {time.monotonic() - started:.0f} s")
    return int(any(v.verdict == "wrong" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
