"""Repeats: what counts as one, who stays, and recall and precision of near ones against every pair compared."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpus import alike, documents, edited, examples, near_repeats

from shardwise.config.schema import Refine
from shardwise.core.words import words_of
from shardwise.data import duplicates
from shardwise.data.duplicates import DuplicateFinder, Removals, band_shape, row_keys
from shardwise.data.examples import Example

EXACT, NEAR = Refine(duplicates="exact"), Refine(duplicates="near")


def find(folder: Path, refine: Refine, *sources: list[Example], chunk: int = 2048) -> Removals:
    finder = DuplicateFinder(refine, folder / "keys")
    for index, rows in enumerate(sources):
        for begin in range(0, len(rows), chunk):
            keys = row_keys(rows[begin : begin + chunk], refine)
            finder.add(index, pickle.loads(pickle.dumps(keys)))  # as from a worker
    return finder.removed()


def chat(number: int, *turns: tuple[str, str], **more: Any) -> Example:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Example(f"c.jsonl:{number + 1}", number, "chat", messages=messages, **more)


def test_exact_across_sources_the_first_stays(tmp_path: Path) -> None:
    first = examples(["Hello there.", "Other", "Hello   there.\n"], "a.jsonl")
    second = examples(["other", "Caf\u00e9 Z", "Other", "Cafe\u0301 Z"], "b.jsonl")
    found = find(tmp_path, EXACT, first, second, chunk=2)
    assert found.of(0) == {2: ("duplicate", "repeats a.jsonl:1")}  # white space
    assert found.of(1) == {2: ("duplicate", "repeats a.jsonl:2"), 3: ("duplicate", "repeats b.jsonl:2")}  # NFC
    assert found.of(1, 3) == {3: ("duplicate", "repeats b.jsonl:2")} and found.of(1, 0, 2) == {} and found.of(2) == {}
    assert len(found) == 3 and found.counts() == {"duplicate": 3, "near duplicate": 0}


def test_exact_counts_everything_that_shapes_a_row(tmp_path: Path) -> None:
    base = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")]
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [
        chat(0, *base),
        chat(1, *base[1:]),
        chat(2, base[0], ("user", "Hello"), ("assistant", "Hi")),
        chat(3, *base, tools=(tool,)),
        chat(4, *base, weights=(None, None, 0)),
        chat(5, *base, weights=(None, None, None)),
        Example("c:7", 6, "pair", prompt="Hi", text="Hello"),
        Example("c:8", 7, "kto", messages=({"role": "user", "content": "q"},), chosen=({"content": "a"},), label=True),
        Example("c:9", 8, "kto", messages=({"role": "user", "content": "q"},), chosen=({"content": "a"},), label=False),
        Example("c:10", 9, "tokens", tokens=(1, 2), learned=(False, True)),
        Example("c:11", 10, "tokens", tokens=(1, 2)),
        Example("c:12", 11, "tokens", tokens=(1, 2)),
        Example("c:13", 12, "segments", segments=(("a", True), ("b", False))),
        Example("c:14", 13, "segments", segments=(("a", False), ("b", True))),
    ]
    assert sorted(find(tmp_path, EXACT, rows).of(0)) == [5, 6, 11]


def test_near_is_by_words_and_by_who_says_them(tmp_path: Path) -> None:
    german, english = documents(2, 3)
    rows = [
        chat(0, ("user", german), ("assistant", english)),
        chat(1, ("user", english), ("assistant", german)),  # the other direction is another task
        chat(2, ("system", "You are a poet."), ("user", german.upper()), ("assistant", english.replace(".", " !"))),
        Example("c:4", 3, "pair", prompt=german, text=english),
    ]
    found = find(tmp_path, NEAR, rows).of(0)
    assert found == {2: ("near duplicate", "100% like c.jsonl:1"), 3: ("duplicate", "repeats c.jsonl:1")}


def test_a_shared_system_prompt_makes_no_repeats(tmp_path: Path) -> None:
    system = documents(1, 1, words=900)[0]
    rows = [chat(i, ("system", system), ("user", text)) for i, text in enumerate(documents(50, 2, words=40))]
    assert not len(find(tmp_path, NEAR, rows))


def test_preferences_turned_round_are_not_repeats(tmp_path: Path) -> None:
    one, two = ({"role": "assistant", "content": text} for text in documents(2, 5))
    ask = ({"role": "user", "content": "Which one?"},)
    rows = [
        Example("p:1", 0, "preference", messages=ask, chosen=(one,), rejected=(two,)),
        Example("p:2", 1, "preference", messages=ask, chosen=(two,), rejected=(one,)),
    ]
    assert not len(find(tmp_path, NEAR, rows))


def test_short_and_wordless_rows(tmp_path: Path) -> None:
    texts = ["Hello world", "hello, world!", "Hello you", "", "", "!!!", "???", "12 + 35", "12 - 35", "👍", "👎"]
    found = find(tmp_path, NEAR, examples(texts)).of(0)
    assert {row: fate for row, (fate, _) in found.items()} == {1: "near duplicate", 4: "duplicate"}


def test_scripts_without_spaces(tmp_path: Path) -> None:
    draw = random.Random(0)
    signs = [chr(c) for c in range(0x4E00, 0x4E00 + 1500)]
    thai = [chr(c) for c in range(0x0E01, 0x0E2E)]
    chinese = "".join(draw.choices(signs, k=300))
    siamese = "".join(draw.choices(thai, k=300))
    texts = [chinese, chinese[:150] + "新" + chinese[150:], "".join(draw.choices(signs, k=300)), siamese, siamese[7:]]
    texts += ["q" + "".join(draw.choices("abcdefgh", k=400))]
    texts += [texts[-1][:200] + "z" + texts[-1][200:]]  # one run of letters: compared by character
    assert sorted(find(tmp_path, NEAR, examples(texts)).of(0)) == [1, 4, 6]


def test_not_transitive_and_order_decides(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(200)]
    rows = examples([" ".join(words[i : i + 120]) for i in (0, 12, 24)])  # neighbours 0.81, the ends 0.66
    found = find(tmp_path, NEAR, rows).of(0)
    assert found == {1: ("near duplicate", "81% like a.jsonl:1")}


def test_long_rows_keep_a_sample(tmp_path: Path) -> None:
    draw = random.Random(2)
    text = " ".join(f"w{draw.randrange(50_000)}" for _ in range(30_000))
    words = text.split()
    rows = examples([text, " ".join(words[:28_000]), " ".join(words[:20_000]), edited(text, 0.01, draw)])
    keys = row_keys(rows, NEAR)
    assert keys.sizes.max() == duplicates.KEPT
    assert sorted(find(tmp_path, NEAR, rows).of(0)) == [1, 3]


def test_bands_find_pairs_at_the_threshold() -> None:
    for least in np.arange(0.5, 1.0, 0.01):
        bands, rows = band_shape(float(least))
        assert 1 - (1 - least**rows) ** bands >= 0.99 and bands * rows <= duplicates.HASHES
    assert band_shape(1.0) == (1, 8)


def test_nothing_to_compare(tmp_path: Path) -> None:
    assert not len(find(tmp_path, NEAR)) and not len(find(tmp_path, EXACT, []))
    assert not len(find(tmp_path, NEAR, examples(documents(20, 6))))
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["where"]  # the rest is large and of no use


def test_chunks_come_in_order(tmp_path: Path) -> None:
    finder = DuplicateFinder(EXACT, tmp_path)
    rows = examples(documents(4, 6))
    finder.add(0, row_keys(rows[2:], EXACT))
    finder.add(1, row_keys(rows, EXACT))
    with pytest.raises(AssertionError, match="in order"):
        finder.add(0, row_keys(rows[:2], EXACT))


@pytest.fixture(scope="module")
def planted() -> tuple[list[str], list[dict[int, float]]]:
    """3,000 documents, 400 of them near copies at edit rates from 0.2% to 12%, and all pairs that are alike."""
    draw = random.Random(11)
    texts = documents(2600, 1)
    rates = [0.002, 0.01, 0.02, 0.04, 0.08, 0.12]
    texts += [edited(texts[draw.randrange(2600)], draw.choice(rates), draw) for _ in range(400)]
    draw.shuffle(texts)
    return texts, alike(texts, 0.5)


@pytest.mark.parametrize("least", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_planted_near_repeats(tmp_path: Path, planted: Any, least: float) -> None:
    texts, pairs = planted
    expected = near_repeats(pairs, least)
    found = set(find(tmp_path, Refine(duplicates="near", similarity=least), examples(texts)).of(0))
    recall, precision = len(found & expected) / len(expected), len(found & expected) / len(found)
    print(f"\n{least}: {len(expected)} repeats, recall {recall:.4f}, precision {precision:.4f}")
    assert len(expected) > 50
    assert recall >= 0.95 and precision >= 0.99


def test_rows_of_one_template(tmp_path: Path) -> None:
    """All rows share most of their words and so many buckets: repeats are still found, and no others."""
    draw = random.Random(4)
    template = documents(1, 9, words=400)[0]
    texts = [f"{template} {text}" for text in documents(1400, 10, words=120)]
    texts += [edited(texts[index], 0.005, draw) for index in range(0, 1400, 14)]
    pairs = alike(texts, 0.6)
    likeness = [s for earlier in pairs for s in earlier.values()]
    expected = near_repeats(pairs, 0.9)
    begin = time.process_time()
    found = set(find(tmp_path, Refine(duplicates="near", similarity=0.9), examples(texts)).of(0))
    seconds = time.process_time() - begin
    print(f"\n{len(likeness)} pairs above 0.6; {len(expected)} repeats, {len(found & expected)} found, {seconds:.1f} s")
    assert len(expected) > 50 and len(likeness) > 100_000
    assert len(found & expected) / len(expected) >= 0.95 and len(found & expected) / len(found) >= 0.99


def test_words() -> None:
    assert words_of("It's 5-6, a_b\u2014NA\u00cfVE \ufb01n!") == [
        b"it", b"s", b"5", b"6", b"a_b", "naïve".encode(), b"fin"
    ]  # fmt: skip
    assert words_of("5-6 = x", signs=True) == [b"5", b"-", b"6", b"=", b"x"]
    assert words_of("5-6 = ü", signs=True) == [b"5", b"-", b"6", b"=", "ü".encode()]
    assert words_of("5-6 = ü") == [b"5", b"6", "ü".encode()]
    assert words_of("हिन्दी में।") == ["हिन्दी".encode(), "में".encode()]
    assert len(words_of("z" * 40)) == 1 and len(words_of("z" * 41)) == 41 and len(words_of("é" * 40)) == 1
    assert words_of("") == [] == words_of("…")


_GROWTH = """
import sys, time
from pathlib import Path
from support.corpus import documents, examples
from shardwise.config.schema import Refine
from shardwise.data.duplicates import DuplicateFinder, row_keys
folder, chunks = Path(sys.argv[1]), int(sys.argv[2])
refine = Refine(duplicates="near")
finder = DuplicateFinder(refine, folder)
spent = 0.0
import dataclasses
for chunk in range(chunks):
    rows = [dataclasses.replace(e, number=e.number + chunk * 1000) for e in examples(documents(1000, chunk, words=450))]
    begin = time.process_time()
    finder.add(0, row_keys(rows, refine))
    spent += time.process_time() - begin
begin = time.process_time()
found = finder.removed()
# Not ru_maxrss, which begins with that of the process that started this one.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(len(found), chunks * 1000 / spent, time.process_time() - begin, peak)
"""


@pytest.mark.slow
def test_memory_and_speed_at_25_000(tmp_path: Path) -> None:
    """Five times the rows cost less than 300 bytes of memory for each row more: about 90; n-grams would be 1,500."""
    peak = {}
    for chunks in (5, 25):
        run = [sys.executable, "-c", _GROWTH, str(tmp_path / str(chunks)), str(chunks)]
        out = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
        print(f"\n{chunks * 1000} rows: {float(out[1]):.0f} rows/s, {float(out[2]):.1f} s to compare, {out[3]} KB")
        peak[chunks] = int(out[3]) * 1024
    assert (peak[25] - peak[5]) / 20_000 < 300
