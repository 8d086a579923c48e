"""Near duplicates, side by side with datasketch: rows per second, memory, recall and precision, on one core.

    pip install datasketch
    PYTHONPATH=tests python benchmarks/duplicates.py [--rows 50000] [--words 150] [--datasketch-rows 5000]

The rows are those of the tests (tests/support/corpus.py), one in ten a near copy. datasketch gets the same 5-grams of
words and as many hashes, in its fastest form (MinHash.bulk with crc32), and its candidates are not verified.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
import zlib
from pathlib import Path

from support.corpus import alike, documents, edited, examples, near_repeats

from shardwise.config.schema import Refine
from shardwise.data.duplicates import DuplicateFinder, band_shape, row_keys

LEAST = 0.8


def ours(texts: list[str]) -> tuple[float, float, set[int]]:
    """Seconds to make keys, seconds to compare, rows that go."""
    refine = Refine(duplicates="near", similarity=LEAST)
    rows = examples(texts)
    with tempfile.TemporaryDirectory() as folder:
        finder = DuplicateFinder(refine, Path(folder))
        begin = time.process_time()
        for at in range(0, len(rows), 2048):
            finder.add(0, row_keys(rows[at : at + 2048], refine))
        middle = time.process_time()
        found = finder.removed()
        return middle - begin, time.process_time() - middle, set(found.of(0))


def theirs(texts: list[str]) -> tuple[float, float, set[int]]:
    """The same with datasketch; the first of rows that are alike stays."""
    from datasketch import MinHash, MinHashLSH

    bands, rows = band_shape(LEAST)
    begin = time.process_time()
    grams = []
    for text in texts:
        words = text.lower().replace(".", " ").split()
        grams.append([" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)])
    hashes = MinHash.bulk(grams, num_perm=bands * rows, hashfunc=zlib.crc32)
    middle = time.process_time()
    index = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    gone = set()
    for row, minhash in enumerate(hashes):
        if index.query(minhash):
            gone.add(row)
        else:
            index.insert(row, minhash)
    return middle - begin, time.process_time() - middle, gone


def main() -> None:
    """Prints one line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--datasketch-rows", type=int, default=5_000)
    options = parser.parse_args()
    draw = random.Random(0)
    texts = documents(options.rows * 9 // 10, 0, options.words)
    texts += [edited(draw.choice(texts), draw.uniform(0, 0.04), draw) for _ in range(options.rows - len(texts))]
    draw.shuffle(texts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    few = texts[: options.datasketch_rows]
    expected = near_repeats(alike(few, LEAST), LEAST)
    for name, act, given in (("shardwise", ours, few), ("datasketch", theirs, few), ("shardwise", ours, texts)):
        keys, compare, gone = act(given)
        line = f"{name:10} {len(given):6} rows: keys {len(given) / keys:6.0f}/s, compare {len(given) / compare:6.0f}/s"
        line += f", both {len(given) / (keys + compare):6.0f}/s, {len(gone)} go"
        if given is few:
            line += f", recall {len(gone & expected) / len(expected):.3f}"
            line += f", precision {len(gone & expected) / len(gone):.3f}"
        print(line, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"peak memory beside the texts: {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
