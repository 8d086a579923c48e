"""The measured tables of docs/comparison.md, from the files that benchmarks/ left: `python docs/site/comparing.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/comparison.md"
WORK = {  # rows of benchmarks/peers_h200.json, in this order: what is done
    "8b-full": "Llama 8B, full, bf16, 2 × 4,096 tokens",
    "8b-full of 4": "the same, 4 × 4,096 tokens",
    "8b-fp8": "Llama 8B, full, fp8, 2 × 4,096",
    "1b-full": "Llama 1B, full, bf16, 8 × 4,096",
    "8b-lora": "Llama 8B, LoRA of rank 16, all linear, 2 × 4,096",
    "8b-lora, another call": "the same in another call",
    "8b-qlora": "Llama 8B, QLoRA (NF4), 2 × 4,096",
    "32b-qlora": "Qwen2.5 32B, QLoRA (NF4), 1 × 4,096",
    "moe": "Qwen3-30B-A3B, 12 of 48 layers, full, 4 × 4,096",
}
WHO = {
    "compiled-liger": "transformers, compiled blocks, Liger's loss; bf16 weights and states",
    "hf-liger": "transformers + Liger; bf16 weights and states",
    "hf-loop": "transformers + Liger, its loop over experts",
    "compiled-torchao": "transformers, compiled blocks, torchao fp8 tensorwise, Liger's loss; bf16 weights and states",
    "peft-best": "PEFT, bf16 adapters, Liger's loss, compiled",
    "peft-liger": "PEFT + Liger",
    "peft-bnb": "PEFT + bitsandbytes + Liger, bf16 adapters",
    "ours": "**Shardwise**, AdamW on 32-bit weights and states",
    "ours-8bit": "**Shardwise**, adamw8bit on 32-bit weights",
    "ours-fp8": "**Shardwise**, AdamW on 32-bit weights and states",
    "ours-8bit-fp8": "**Shardwise**, adamw8bit on 32-bit weights",
    "ours-8bit-fp8-fast": "**Shardwise**, the same with `advanced.fp8.use_fast_accum`",
    "ours-lora": "**Shardwise**",
    "ours-lora-fp8": "**Shardwise**, base in fp8",
    "ours-qlora-fp8": "**Shardwise**, `multiply: fp8`, `recompute: light`",
}


def peers() -> str:
    """One H200: every contestant of every row, and how we stand to the best of the others."""
    data: dict[str, dict[str, dict[str, Any]]] = json.loads((ROOT / "benchmarks/peers_h200.json").read_text())
    assert set(data) == set(WORK), "a row that has no name here"
    lines = ["| work | who | tokens/s | MFU | GiB | to the best other |", "| --- | --- | --- | --- | --- | --- |"]
    for row, work in WORK.items():
        found = sorted(data[row].items(), key=lambda one: (one[0].startswith("ours"), one[1]["tokens_per_second"]))
        best = max((c["tokens_per_second"] for who, c in found if not who.startswith("ours")), default=0.0)
        for number, (who, cell) in enumerate(found):
            speed = cell["tokens_per_second"]
            ratio = f"{speed / best:.2f} ×" if who.startswith("ours") and best else ""
            told = (WHO[who], f"{speed:,.0f}", f"{cell['mfu']:.1%}", f"{cell['gib']:.1f}", ratio)
            lines.append(f"| {'' if number else work} | {' | '.join(told)} |")
        if not any(who.startswith("ours") for who, _ in found):
            lines.append("| | **Shardwise** | not measured | | | |")
    cells = [cell for row in data.values() for cell in row.values()]
    told = " and ".join(sorted({f"{c['device']}, torch {c['torch']}, {c['date']}" for c in cells}))
    return f"One {told}.\n\n" + "\n".join(lines)


TABLES = {"peers": peers}


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- measured: {name} -->", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
