"""How well a trained model translates, against copying the source: chrF and exact matches on held-out pairs.

python score_de_en.py out/de-en/model data/de-en/eval.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

ORDER, BETA = 6, 2.0


def chrf(hypotheses: list[str], references: list[str]) -> float:
    """Character n-gram F-score (chrF2) over a corpus, in percent; blanks do not count."""
    scores = []
    for n in range(1, ORDER + 1):
        same = made = wanted = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            a, b = (Counter(t[i : i + n] for i in range(len(t) - n + 1)) for t in map(squeeze, (hypothesis, reference)))
            same, made, wanted = same + (a & b).total(), made + a.total(), wanted + b.total()
        precision, recall = same / max(made, 1), same / max(wanted, 1)
        scores.append((1 + BETA**2) * precision * recall / max(BETA**2 * precision + recall, 1e-9))
    return 100 * sum(scores) / len(scores)


def squeeze(text: str) -> str:
    return "".join(text.split())


@torch.no_grad()
def translate(folder: str, sources: list[str]) -> list[str]:
    """Greedy translations."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    found: list[str] = []
    for at in range(0, len(sources), 50):
        batch = tokenizer(sources[at : at + 50], padding=True, return_tensors="pt")
        found += tokenizer.batch_decode(model.generate(**batch, max_new_tokens=32), skip_special_tokens=True)
    return [text.strip() for text in found]


def main() -> None:
    folder, file = sys.argv[1:]
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    sources, targets = ([row[key] for row in rows] for key in ("source", "target"))
    written = translate(folder, sources)
    small = [source.lower() for source in sources]  # German nouns have capitals: a copy that knows so much
    for name, texts in (("copied", sources), ("in small letters", small), ("translated", written)):
        exact = sum(a == b for a, b in zip(texts, targets, strict=True)) / len(rows)
        print(f"{name:16}  chrF {chrf(texts, targets):5.1f}  exact {exact:.1%}")
    for row, text in list(zip(rows, written, strict=True))[:10]:
        print(f"  {row['source']} → {text}   ({row['target']})")


if __name__ == "__main__":
    main()
