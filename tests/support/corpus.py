"""Documents of made-up but English-like sentences, near copies of them at a chosen edit rate, and plain references."""

from __future__ import annotations

import random
import re

import numpy as np

from shardwise.data.examples import Example

SUBJECTS = "the committee,a young engineer,our neighbour,the old river,this report,every student,the museum,her letter"
VERBS = "describes,ignored,carried,would not accept,slowly changed,has measured,cannot explain,remembers,sold"
OBJECTS = "the price of bread,a broken machine,three hundred letters,the first winter,all of its members,a quiet street"
ENDS = "before the war,in the northern district,without much success,as the figures show,since last Tuesday,by accident"


def documents(count: int, seed: int, words: int = 150) -> list[str]:
    """So many unlike documents of about this length."""
    draw = random.Random(seed)
    names = ["".join(draw.choices("aeioubdfgklmnprstvz", k=draw.randint(3, 8))) for _ in range(4000)]

    def sentence() -> str:
        pieces = [draw.choice(options.split(",")) for options in (SUBJECTS, VERBS, OBJECTS, ENDS)]
        pieces.insert(draw.randint(1, 4), " ".join(draw.choices(names, k=draw.randint(1, 5))))
        return " ".join(pieces).capitalize() + "."

    return [" ".join(sentence() for _ in range(draw.randint(words // 30 + 1, words // 10 + 1))) for _ in range(count)]


def edited(text: str, share: float, draw: random.Random) -> str:
    """A near copy: words replaced, left out and put in, spaces, case and punctuation changed."""
    out: list[str] = []
    for word in text.split():
        chance = draw.random()
        if chance < share / 2:
            out.append(draw.choice(["another", "green", "window", "perhaps", "1984"]))
        elif chance < share * 0.75:
            continue
        elif chance < share:
            out += [word, draw.choice(["indeed", "very", "of"])]
        else:
            out.append(word.upper() if draw.random() < 0.02 else word.rstrip(".") if draw.random() < 0.1 else word)
    return "  ".join(out)


def examples(texts: list[str], file: str = "a.jsonl") -> list[Example]:
    """Texts as the rows of a file."""
    return [Example(f"{file}:{i + 1}", i, "text", text=text) for i, text in enumerate(texts)]


def alike(texts: list[str], least: float) -> list[dict[int, float]]:
    """Reference: for each text the earlier ones that are that similar (Jaccard of word 5-grams); every pair is seen."""
    numbers: dict[tuple[str, ...], int] = {}
    sets: list[np.ndarray] = []
    for text in texts:
        words = re.findall(r"[a-z0-9]+", text.lower())
        grams = {tuple(words[i : i + 5]) for i in range(len(words) - 4)}
        sets.append(np.array([numbers.setdefault(gram, len(numbers)) for gram in grams]))
    sizes = np.array([len(s) for s in sets])
    flat, starts = np.concatenate(sets), np.cumsum(sizes) - sizes
    found = []
    mine = np.zeros(len(numbers), dtype=np.int64)
    for row, grams in enumerate(sets):
        mine[grams] = 1
        common = np.add.reduceat(mine[flat[: starts[row]]], starts[:row]) if row else np.empty(0)
        mine[grams] = 0
        similarity = common / (sizes[row] + sizes[:row] - common)
        found.append({int(other): float(similarity[other]) for other in np.flatnonzero(similarity >= least)})
    return found


def near_repeats(pairs: list[dict[int, float]], least: float) -> set[int]:
    """Reference: a text goes if one that stays comes before it and is that similar."""
    gone: set[int] = set()
    for row, earlier in enumerate(pairs):
        if any(similarity >= least and other not in gone for other, similarity in earlier.items()):
            gone.add(row)
    return gone
