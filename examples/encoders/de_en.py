"""Related words of Debian's German–English dictionary, and a tokenizer for both languages.

    apt-get download trans-de-en && dpkg-deb -x trans-de-en_*.deb trans
    python de_en.py trans/usr/share/trans/de-en FOLDER [--pairs 40000] [--alike 0.6] [--letters 14]

Writes train.jsonl and eval.jsonl with rows {"source": …, "target": …} and FOLDER/tokenizer. Kept are short words that
look alike (Konferenz, conference; polemisieren, to polemize): how to translate those can be learned in minutes, and
copying them is a baseline worth beating. An entry with all its forms goes to one side: what is evaluated is new to the
model. The tokenizer knows little more than letters: a model cannot spell what it sees in large pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from difflib import SequenceMatcher
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

NOTES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|<[^>]*>|/[^/]*/")


def pairs(line: str, alike: float, letters: int) -> list[tuple[str, str]]:
    """The forms of an entry with their translations: the first of several, without remarks, if they look alike."""
    german, _, english = line.partition(" :: ")
    sides = [[clean(form) for form in side.split("|")] for side in (german, english)]
    if len(sides[0]) != len(sides[1]):
        return []
    short = [(a, b) for a, b in zip(*sides, strict=True) if len(a) <= letters and is_word(a) and is_word(b)]
    return [(a, b) for a, b in short if likeness(a, b) >= alike]


def is_word(text: str) -> bool:
    """One word, or a verb with its "to"."""
    return len(text.removeprefix("to ").split()) == 1


def likeness(german: str, english: str) -> float:
    """1 for the same letters in the same order, 0 for none in common."""
    return SequenceMatcher(None, german.lower(), english.lower().removeprefix("to "), autojunk=False).ratio()


def clean(form: str) -> str:
    first = NOTES.sub(" ", form).split(";")[0]
    return "" if re.search(r"\.\.\.|[/\"|]", first) else " ".join(first.split())


def train_tokenizer(texts: list[str], folder: Path, size: int) -> None:
    """T5's kind: blanks are part of words, </s> ends a text."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.normalizer, raw.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dictionary", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=40_000)
    parser.add_argument("--alike", type=float, default=0.6, help="from 0 (any pair) to 1 (the same word)")
    parser.add_argument("--letters", type=int, default=14, help="of a German word, at most")
    parser.add_argument("--vocabulary", type=int, default=128)
    arguments = parser.parse_args()
    lines = [line for line in arguments.dictionary.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
    entries = [found for line in lines if (found := pairs(line, arguments.alike, arguments.letters))]
    held = [entry[0] for entry in entries[:500]]
    known = {side for pair in held for side in pair}
    train = [pair for entry in entries[500:] for pair in entry if known.isdisjoint(pair)][: arguments.pairs]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("eval", held)):
        text = "".join(json.dumps({"source": a, "target": b}, ensure_ascii=False) + "\n" for a, b in rows)
        (arguments.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(rows)} pairs, e.g. {rows[0]}")
    train_tokenizer([side for pair in train for side in pair], arguments.folder / "tokenizer", arguments.vocabulary)


if __name__ == "__main__":
    main()
