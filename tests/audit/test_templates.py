"""The audit of chat templates finds nothing wrong, and finds what is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from audit.conversations import shapes
from audit.templates import BASIC, Verdict, audit, own, summary
from shardwise.data import render, template, turns
from shardwise.data import turn_ends as ends
from shardwise.data.template_probe import TemplateStyle
from shardwise.data.turn_ends import End

PLAIN = (
    "one answer",
    "two answers",
    "three answers",
    "two answers in a row",
    "punctuation at the end",
    "ends with a question",
)
SOME = [s for s in shapes() if s.name in PLAIN]
TEMPLATES = own("chatml", "command-a", "vicuna", "glm", "asked-once", "phi3", "metharme")


def wrong(verdicts: list[Verdict]) -> list[Verdict]:
    return [v for v in verdicts if v.verdict == "wrong"]


def test_nothing_is_wrong_without_a_bug() -> None:
    assert not wrong(audit(TEMPLATES, only=SOME))


# --- planted bugs ------------------------------------------------------------------------------------------------


def first_eos_anywhere(patch: pytest.MonkeyPatch) -> None:
    """An answer without an end of its own ends with the first eos, across later turns."""
    end = turns.Turns._end

    def _end(self: Any, index: int, place: int, calls: str = "") -> int:
        found, eos = end(self, index, place, calls), self.template.tokenizer.eos_token
        at = self.text.find(eos, place)
        return found if found > place or at < 0 else at + len(eos)

    patch.setattr(turns.Turns, "_end", _end)
    patch.setattr(turns.Turns, "_check_others", lambda *_: None)  # which would refuse it


def changed_end(change: Callable[[Any, Any, End], End]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        find = ends.find_end

        def find_end(markers: Any, opening: Any, around: Any, role: str | None, *more: Any, **named: Any) -> End | None:
            end = find(markers, opening, around, role, *more, **named)
            return end and change(markers, around.gaps.get(role, around.last) or "", end)

        patch.setattr(turns, "find_end", find_end)

    return plant


def first_marker(markers: Any, gap: str, end: End) -> End:
    """Only the first marker of an end is trained on."""
    mark = markers.all.search(end.text)
    return End(end.text[: mark.end()], end.added) if mark else end


def next_header(markers: Any, gap: str, end: End) -> End:
    """The header of the next turn is trained on as well."""
    return End(gap.strip(), end.added) if end.text else end


def no_end(markers: Any, gap: str, end: End) -> End:
    """Ends of turn are not trained on."""
    return End("", end.added)


def second_header(patch: pytest.MonkeyPatch) -> None:
    """The header of a second answer in a row is trained on."""
    patch.setattr(TemplateStyle, "opens", lambda *_: False)


def no_prompt(patch: pytest.MonkeyPatch) -> None:
    """An answer begins where the message before it ended: its header is trained on."""
    begin = turns.Turns._begin

    def _begin(self: Any, index: int, words: int, limit: int) -> int:
        begin(self, index, words, limit)
        return int(self._find_end(index - 1) or 0)

    patch.setattr(turns.Turns, "_begin", _begin)


def fused_tokens(patch: pytest.MonkeyPatch) -> None:
    """A token that reaches into the next turn is trained on."""
    patch.setattr(render.Encoded, "reaches", lambda self, place: place)
    patch.setattr(render.Joined, "reaches", lambda self, place: place)


def stale_shapes(patch: pytest.MonkeyPatch) -> None:
    """Places are taken over from the quick way one character too late."""
    fit = template._Shape.fit

    def late(self: Any, text: str, messages: Any) -> Any:
        mask = fit(self, text, messages)
        return mask and template.Mask(mask.text, [(a + 1, b) for a, b in mask.spans], mask.notes)

    patch.setattr(template._Shape, "fit", late)


# The bug, and what the audit must say of it.
BUGS = {
    "end at the first eos anywhere": (first_eos_anywhere, "trains on another's words"),
    "first marker of the end only": (changed_end(first_marker), "does not end with ['<|END_RESPONSE|>"),
    "header of the next turn": (changed_end(next_header), "'<|im_start|>', which opens a turn"),
    "no end of turn": (changed_end(no_end), "does not end with"),
    "header of a second answer": (second_header, "'<|im_start|>', which opens a turn"),
    "header of every answer": (no_prompt, "'ASSISTANT:', which opens a turn"),
    "token of the next turn": (fused_tokens, ".<|'"),
    "quick way off by one": (stale_shapes, "does not train on all of"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, reason = BUGS[bug]
    plant(monkeypatch)
    found = wrong(audit(TEMPLATES, only=SOME))
    assert any(reason in verdict.reason for verdict in found), found[:5]


# --- all of them -------------------------------------------------------------------------------------------------


def right_in(verdicts: list[Verdict], mode: str, kind: str) -> int:
    """Templates under which the basic conversations of a kind are right."""
    some = [v for v in verdicts if v.mode == mode and v.shape in BASIC[kind]]
    return len({v.template for v in some} - {v.template for v in some if v.verdict != "right"})


def test_our_own_templates() -> None:
    verdicts = audit(own())
    assert not wrong(verdicts), wrong(verdicts)[:5]
    assert right_in(verdicts, "special", "multi") == len(own())


@pytest.mark.timeout(3600)
def test_real_templates() -> None:
    """Needs the package index, or its files in the cache."""
    from audit.corpus import templates

    verdicts = audit(templates())
    print(summary(verdicts))
    assert not wrong(verdicts), wrong(verdicts)[:5]
    assert len(templates()) >= 150 and len(shapes()) >= 30
    assert right_in(verdicts, "special", "single") >= 130 and right_in(verdicts, "special", "multi") >= 130
    assert right_in(verdicts, "special", "tools") >= 40
