"""The filter language: what it says of rows, what it refuses, and that nothing in it can run away."""

from __future__ import annotations

import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.load import load_run
from shardwise.config.row_filter_operations import FUNCTIONS
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Example
from shardwise.data.expression import Expression

ROW: dict[str, Any] = {
    "lang": "en",
    "score": 0.75,
    "votes": 12,
    "title": "  Hello World  ",
    "ok": True,
    "tags": ["news", "sport"],
    "scores": [1, 5, 3],
    "meta": {"source": "web", "date": {"year": 2024}, "from": "x"},
    "my column": "odd",
    "nothing": None,
    "as_text": "12",
    "min": 7,
    "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "As an AI, I …"}],
}
EXAMPLE = Example(
    "a.jsonl:3",
    2,
    "chat",
    messages=(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Light scatters."},
    ),
)

CASES = [
    ("lang == 'en'", True),
    ("lang != 'en'", False),
    ("lang in ['en', 'de']", True),
    ("lang not in ('fr', 'de')", True),
    ("0.5 < score <= 0.75", True),
    ("0.5 < score < 0.75", False),
    ("votes % 5 == 2 and votes // 5 == 2", True),
    ("votes / 8 == 1.5", True),
    ("votes * 2 - 4 == 20", True),
    ("-votes < 0 < +votes", True),
    ("not ok", False),
    ("ok", True),
    ("ok is True and nothing is None", True),
    ("missing is None", True),
    ("missing is not None", False),
    ("missing == None or missing > 3", True),
    ("missing is not None and missing > 3", False),
    ("(missing or 5) > 3", True),
    ("meta.source == 'web'", True),
    ("meta['source'] == 'web'", True),
    ("meta.date.year >= 2020", True),
    ("meta.absent.deeper is None", True),
    ("meta['from'] == 'x'", True),
    ("row['my column'] == 'odd'", True),
    ("messages[-1].role == 'assistant'", True),
    ("messages[9].role is None", True),
    ("startswith(messages[-1].content, 'As an AI')", True),
    ("contains(lower(messages[-1].content), 'as an ai')", True),
    ("endswith(lang, 'n') and upper(lang) == 'EN'", True),
    ("strip(title) == 'Hello World'", True),
    ("len(strip(title)) == 11 and words(title) == 2", True),
    ("words('我喜欢学习') == 5", True),
    ("'news' in tags and len(tags) == 2", True),
    ("contains(tags, 'sport') and not contains(tags, 'art')", True),
    ("'we' in meta.source and 'source' in meta", True),
    ("any(t == 'sport' for t in tags)", True),
    ("all(s > 1 for s in scores)", False),
    ("any(s > 4 and lang == 'en' for s in scores)", True),
    ("any(any(a == b + 2 for b in scores) for a in scores)", True),
    ("all([ok, votes])", True),
    ("max(scores) == 5 and min(scores) == 1 and min == 7", True),
    ("max(1, votes, 3) == 12 and abs(-3) == 3", True),
    ("int(as_text) == 12 and float('0.5') == 0.5 and str(votes) == as_text", True),
    ("'a' + lang == 'aen'", True),
    (r"matches(title, r'\bW\w+d\b')", True),
    ("matches(title, '^Hello')", False),
    ("matches(text, '(?i)SKY')", True),
    ("contains(text, 'Be brief.') and contains(text, 'scatters')", True),
    ("turns == 2", True),
    ("words(text) == 9", True),
    ("lang == 'en' or 1 / 0 > 1", True),
    ("votes", True),
    ("nothing", False),
    ("missing and missing > 1", False),
    ("lang == 'en' and\n  # a remark\n  votes > 3", True),
    ("  votes > 3\n", True),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_value(text: str, expected: bool) -> None:
    assert Expression(text).matches(ROW, EXAMPLE) is expected


def test_columns_come_before_special_names() -> None:
    assert Expression("text == 'own' and turns == 'many'").matches({"text": "own", "turns": "many"}, EXAMPLE)
    text = Example("a.txt", 0, "text", text="one two")
    assert Expression("text == 'one two' and turns == 1 and other is None").matches("one two", text)


def test_pickles() -> None:
    again = pickle.loads(pickle.dumps(Expression("matches(lang, '^e') and any(s > 4 for s in scores)")))
    assert again.matches(ROW, EXAMPLE)


REFUSED = [  # text, part of the message, character at which it is wrong
    ("len(text) >", "not an expression", 12),
    ("lang = 'en'", "not an expression", None),
    ("from == 'x'", "not an expression", 1),
    ("lang == 'en' and lenght(text) > 3", "no function lenght", 18),
    ("'é' == lang and foo(1)", "no function foo", 17),
    ("lang == 'en' and\nfoo(1)", "no function foo", 18),
    ("  foo(1)", "no function foo", 3),
    ("__import__('os').system('ls')", "not a function", 1),
    ("text.lower() == 'a'", "not a function", 1),
    ("(lambda: 1)()", "not a function", None),
    ("eval('1')", "no function eval", 1),
    ("9 ** 9 ** 9", "not allowed", 1),
    ("1 << 1000000000", "not allowed", 1),
    ("[x for x in tags]", "not allowed", 1),
    ("any(x for x in tags if x)", "only `test for x in list`", 4),
    ("any(x for x in tags for y in tags)", "only `test for x in list`", 4),
    ("(x := 3) > 2", "not allowed", 2),
    ("f'{lang}' == 'en'", "not allowed", 1),
    ("{'a': 1} == meta", "not allowed", 1),
    ("lang[0:1] == 'e'", "slices", 1),
    ("b'x' == lang", "not allowed", 1),
    ("1j == 1", "not allowed", 1),
    ("... == 1", "not allowed", 1),
    ("ok == true", "would be a column", 7),
    ("lang is 'en'", "None, True and False only", 9),
    ("~votes == 1", "~ is not allowed", 1),
    ("len() > 1", "takes 1 argument", 1),
    ("startswith(lang) == 1", "takes 2 arguments", 1),
    ("len(*tags) > 1", "plain arguments", 1),
    ("len(obj=tags) > 1", "plain arguments", 1),
    ("ok if ok else ok", "not allowed", 1),
    ("await ok", "not allowed", None),
    ("matches(text, '(')", "not a pattern", 15),
    ("matches(text, lang)", "a pattern in quotes", 1),
    ("matches(text, 'a{99999999999}')", "numbers in braces", 15),
    ("matches(text, '((((a{100}){100}){100}){100})')", "numbers in braces", 15),
    ("matches(text, '" + "a" * 1001 + "')", "longer than 1000", 15),
    ("", "is empty", None),
    ("  ", "is empty", None),
    ("a" * 5000, "5000 characters", None),
    ("(" * 500 + "1" + ")" * 500, "not an expression", None),
    ("not " * 900 + "ok", "", None),
    ("-" * 3900 + "1", "", None),
    ("a" + ".b" * 1900, "", None),
    ("+".join(["1"] * 1500), "", None),
    ("ok\x00", "", None),
    ("'\ud83d' == lang", "", None),
]


@pytest.mark.parametrize(
    ("text", "problem", "place"), REFUSED, ids=[r[0][:30].encode("ascii", "replace").decode() for r in REFUSED]
)
def test_refused(text: str, problem: str, place: int | None) -> None:
    with pytest.raises(UserError) as caught:
        Expression(text)
    assert caught.value.field == "data.refine.filter" and problem in caught.value.problem
    if place is not None:
        assert f"at character {place}" in caught.value.problem


UNDECIDED = [
    ("score > 'a'", "not a number"),
    ("missing > 3", "None (missing)"),
    ("as_text > 3", "write float(as_text)"),
    ("as_text == 12", "never equal"),
    ("votes in ['12']", "never equal"),
    ("len(missing) > 2", "guard it"),
    ("len(votes) > 2", "was given a number"),
    ("lower(votes) == 'a'", "was given a number"),
    ("lang.part == 1", "has no part"),
    ("tags.part == 1", "has no part"),
    ("lang['x'] == 1", "has no part"),
    ("votes / 0 > 1", "cannot be evaluated"),
    ("int(lang) > 1", "cannot be evaluated"),
    ("float(tags) > 1", "was given a list"),
    ("'a' * 1000000000 == lang", "not a number"),
    ("lang * votes == lang", "not a number"),
    ("'%1000000000d' % votes == lang", "not a number"),
    ("tags + tags == tags", "not a number"),
    ("'x' in missing", "in which nothing can be"),
    ("any(lang)", "not a list"),
    ("max(tags, 1) == 1", "was given"),
    ("max([]) == 1", "was given"),
    ("lang", "not true or false"),
    ("tags", "not true or false"),
    ("1e308 * 10 == int(1e308 * 10)", "cannot be evaluated"),
]


@pytest.mark.parametrize(("text", "problem"), UNDECIDED)
def test_a_row_that_cannot_be_told_is_bad(text: str, problem: str) -> None:
    with pytest.raises(BadRow) as caught:
        Expression(text).matches(ROW, EXAMPLE)
    assert caught.value.where == "a.jsonl:3" and caught.value.number == 2
    assert problem in f"{caught.value.problem} {caught.value.remedy}"


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(x+x+)+y", "(?:a?){40}a{40}b", "(.*?,){20}P", "(a*)*(a*)*c"])
def test_catastrophic_patterns_are_stopped(pattern: str) -> None:
    row = {"t": "a" * 60 + "x" * 60 + "," * 40 + "b", "many": list(range(50))}
    rule = Expression(f"any(matches(t, '{pattern}') and x < 0 for x in many)")
    begin = time.process_time()
    try:
        assert rule.matches(row, EXAMPLE) is False
    except BadRow as bad:
        assert "takes longer than 1 s" in bad.problem
    assert time.process_time() - begin < 8, "a second for the row; one for each item would be 50"


def test_steps_are_bounded() -> None:
    rule = Expression("any(any(any(a + b + c < 0 for c in n) for b in n) for a in n)")
    with pytest.raises(BadRow, match="steps"):
        rule.matches({"n": list(range(1000))}, EXAMPLE)


def test_deep_rows() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    other: Any = 1
    for _ in range(5000):
        other = [other]
    with pytest.raises(BadRow):
        Expression("a == b").matches({"a": deep, "b": other}, EXAMPLE)


def test_unknown_column_is_found_in_the_first_rows() -> None:
    rows = [{"lang": "en"}, {"lang": "de", "score": 1}]
    Expression("lang == 'en' and score and any(x for x in row.x) and text and turns").check_columns(rows, "a.jsonl")
    with pytest.raises(UserError, match=r"no row at the beginning of a\.jsonl .*\n.*did you mean lang"):
        Expression("lnag == 'en'").check_columns(rows, "a.jsonl")


def test_a_column_that_some_sources_lack() -> None:
    with pytest.raises(UserError, match=r"score is None or … keeps their rows"):
        Expression("score > 3").check_columns([{"text": "x"}], "b.jsonl")
    guarded = Expression("score is None or score > 3")
    assert guarded.check_columns([{"text": "x"}], "b.jsonl") == ["score"]
    assert guarded.check_columns([{"score": 1}], "a.jsonl") == []
    assert guarded.matches({"text": "x"}, EXAMPLE) and not guarded.matches({"score": 1}, EXAMPLE)
    with pytest.raises(UserError):
        Expression("score is True or score == 3").check_columns([{"text": "x"}], "b.jsonl")


def test_the_config_names_the_place(tmp_path: Path) -> None:
    file = tmp_path / "RUN.yaml"
    file.write_text(
        'model: smollm2-135m-instruct\ndata:\n  train: a.jsonl\n  refine: {filter: "len(text) > 20 and lenn(x) > 1"}\n'
    )
    with pytest.raises(UserError) as caught:
        load_run(file)
    assert caught.value.field == "data.refine.filter"
    assert "no function lenn, at character 20" in str(caught.value) and "did you mean len" in str(caught.value)


def _random_expression(draw: random.Random, depth: int) -> str:
    if depth == 0:
        leaves = [*ROW, "text", "turns", "row", "absent", "1", "-3", "0", "2.5", "'en'", "'a'", "None", "True", "[]",
                  "x", "10" * 200, "'\\u00e9'", "1e308", "''"]  # fmt: skip
        return str(draw.choice(leaves)).replace("my column", "my_column")
    a, b = (_random_expression(draw, depth - 1) for _ in range(2))
    names = [*FUNCTIONS, "any", "all"]
    forms = [
        f"({a} {draw.choice(['+', '-', '*', '/', '//', '%'])} {b})",
        f"({a} {draw.choice(['<', '<=', '>', '>=', '==', '!=', 'in', 'not in'])} {b})",
        f"({a} {draw.choice(['and', 'or'])} {b})",
        f"(not {a})",
        f"{draw.choice(names)}({a})",
        f"{draw.choice(names)}({a}, {b})",
        f"any({a} for x in {b})",
        f"[{a}, {b}]",
        f"({a})[{b}]",
        f"({a}).role",
        f"matches({a}, {draw.choice(['r', ''])}'{draw.choice(['a+', '(a+)+$', '[', 'x{3}', '.*.*.*z'])}')",
    ]
    return draw.choice(forms)


def test_fuzzed_expressions() -> None:
    """2,000 grown from the grammar and broken at random: a value, UserError or BadRow, and soon."""
    draw = random.Random(5)
    outcomes = {"value": 0, "refused": 0, "bad row": 0}
    begin = time.process_time()
    for index in range(2000):
        text = _random_expression(draw, 1 + index % 4)
        if index % 3 == 0:
            at = draw.randrange(len(text))
            text = (
                text[:at]
                + "".join(draw.choices("()[]'\"\\.,:=!*@#\n {}~é`;\x00", k=draw.randint(1, 3)))
                + text[at + 1 :]
            )
        try:
            result = Expression(text).matches(ROW, EXAMPLE)
            assert isinstance(result, bool)
            outcomes["value"] += 1
        except UserError:
            outcomes["refused"] += 1
        except BadRow as bad:
            assert bad.problem and bad.remedy
            outcomes["bad row"] += 1
    assert min(outcomes.values()) > 100, outcomes
    assert time.process_time() - begin < 60
