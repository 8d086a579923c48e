"""The table in readable form: as a matrix of pairs, as a list of rules, and as docs/combinations.md."""

from __future__ import annotations

from typing import Any

from shardwise.config.advanced import written
from shardwise.config.combinations.check import CombinationVerdict, combines
from shardwise.config.combinations.features import FEATURES, Feature
from shardwise.config.combinations.rules import RULES, CombinationRule

SIGNS = {"allowed": ".", "remark": "o", "refused": "x", "either": " "}
LEGEND = ". combines   o combines, with a remark   x refused   blank: a run has one or the other"
INTRODUCTION = """\
# What combines with what

<!-- Printed by `python -m shardwise.config.combinations > docs/combinations.md`; change the table, not this page. -->

One table (`src/shardwise/config/compat/`) says what settings do not combine. The checks of a run read it, before any
process starts; so do this page and `shardwise config --combinations`. Each refusal is executed by a test through the
real loading of a config, and each pair that combines by a tiny training of two steps on four ranks, whose losses are
compared with those of the same training without sharding, offload, recomputation or axes
(`tests/config/test_compat.py`: a cover of all pairs by some hundred runs, on a CPU; pairs with `device: cuda` and those
of `expert` with seq2seq or masked models are not executed).

Whether a *model* can be divided along an axis depends on the model: [architectures.md](architectures.md). What follows
from the number of ranks, of heads, layers and experts is checked with these numbers at hand.

In Python:

```python
from shardwise.config.combinations import combines

combines("offload.optimizer: cpu", "optimizer: muon")  # Verdict(kind="refused", why=…, remedy=…, field=…)
```
"""


def verdicts() -> list[tuple[Feature, Feature, CombinationVerdict]]:
    """Verdicts of all pairs of features, each pair once."""
    return [(a, b, combines(a, b)) for i, a in enumerate(FEATURES) for b in FEATURES[:i]]


def matrix() -> str:
    """All pairs as text, with a numbered row and column per feature."""
    signs_of = {(a, b): SIGNS[verdict.kind] for a, b, verdict in verdicts()}
    width = max(len(item.name) for item in FEATURES)
    numbers = range(1, len(FEATURES) + 1)
    lines = [" " * (width + 4) + " ".join(f"{n // 10 or ' '}" for n in numbers).rstrip()]
    lines += [" " * (width + 4) + " ".join(f"{n % 10}" for n in numbers)]
    for number, item in zip(numbers, FEATURES, strict=True):
        signs = " ".join(signs_of[item, other] for other in FEATURES[: number - 1])
        lines.append(f"{number:2d} {item.name:<{width}} {signs}".rstrip())
    return "\n".join(lines)


def generic_reason(rule: CombinationRule) -> str:
    """The reason of a rule for any run, with placeholders spelled out."""
    words = {
        "stage {parallel.zero}": "such a stage", "{axes}": "these axes", "{divided}": "such",
        "{train.optimizer}": "it", "{recompute}": "none", "{objective.type} rows": "such rows",
        "{objective.type}": "another", "{parallel.pipeline_schedule}": "another", "{precision}": "it",
    }  # fmt: skip
    text = rule.why
    for place, word in words.items():
        text = text.replace(place, word)
    return text


def sides(rule: CombinationRule) -> list[str]:
    """Each side of a rule in words; all values of a setting are named by the setting."""
    return [", ".join(_shortened(side)) for side in rule.sides]


def _shortened(side: tuple[Feature, ...]) -> list[str]:
    names = []
    for group in dict.fromkeys(item.of for item in side):
        members = [item for item in side if item.of == group]
        alternatives = [item for item in FEATURES if item.of == group]
        complete = len(members) == len(alternatives) > 1
        head = members[0].name.partition(":")[0]
        joined = [members[0].name, *(item.name.partition(": ")[2] for item in members[1:])]
        names.append(head if complete else " | ".join(joined))
    return names


def page() -> str:
    """Returns docs/combinations.md as Markdown."""
    parts = [
        INTRODUCTION,
        "## Refused",
        "",
        "| this | with | field | why | instead |",
        "| --- | --- | --- | --- | --- |",
    ]
    parts += [_row(rule) for rule in RULES if rule.verdict == "refused"]
    parts += ["", "## Allowed, with a remark", "", "| this | with | field | remark | instead |"]
    parts += ["| --- | --- | --- | --- | --- |", *(_row(rule) for rule in RULES if rule.verdict == "remark")]
    parts += ["", "## Every pair", "", "```", matrix(), "", LEGEND, "```"]
    return "\n".join(parts) + "\n"


def _row(rule: CombinationRule) -> str:
    first, *others = (side.replace("|", "/") for side in sides(rule))
    return f"| {first} | {' and '.join(others)} | `{written(rule.field)}` | {generic_reason(rule)} | {rule.remedy} |"


def as_json() -> dict[str, Any]:
    """Features, rules and pairs as JSON values; pairs that combine without remarks are omitted."""
    pairs = [
        {"a": a.name, "b": b.name, "verdict": v.kind, "why": v.why, "remedy": v.remedy, "field": v.field}
        for a, b, v in verdicts()
        if v.kind in ("refused", "remark")
    ]
    rules = []
    for rule in RULES:
        names = [[feature.name for feature in side] for side in rule.sides]
        rules.append(
            {
                "verdict": rule.verdict,
                "sides": names,
                "field": written(rule.field),
                "why": generic_reason(rule),
                "remedy": rule.remedy,
            }
        )
    return {"features": [item.name for item in FEATURES], "rules": rules, "pairs": pairs}
