"""The loss of training in 8 bits beside that in 16: the same model, text, order and steps.

    python benchmarks/float8_loss.py OUT.json [KIND…] [KEY=VALUE…] [--folder PREPARED]

The text is the source of Python's standard library, of which modules that begin with u to z are held out; the model a
Llama of 230M parameters with fresh weights, the tokenizer trained on the spot. Kinds: bf16, fp8, "fp8, fast"
(backward's sums with fewer bits), "fp8 by rows".
`--folder`: where text and tokenizer are kept, and taken from if they are there. All kinds run side by side.
Prints for each the mean loss of the last 20 steps and the held-out loss, and how far they are from those in bf16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS = 300
MODEL = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
RUN: dict[str, Any] = {
    "model": {"config": MODEL}, "data": {"sequence_length": 1024}, "compile": True, "method": "full",
    "train": {"steps": STEPS, "batch_size": 16, "micro_batch_size": 16, "learning_rate": 6e-4, "warmup": 30, "seed": 0},
    "checkpoint": {"every": None},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8, fast": {"precision": "fp8", "advanced": {"fp8": {"use_fast_accum": True}}},
    "fp8 by rows": {"precision": "fp8", "fp8": {"recipe": "rowwise"}},
}


def prepare(folder: Path) -> None:
    """Text to train on and to hold out, and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [f for f in files if not {"site-packages", "test", "tests", "dist-packages"} & set(f.parts)]
    texts = [(f.stem < "u", f.read_text(errors="ignore")) for f in files]
    for name, wanted in (("train", True), ("eval", False)):
        lines = [json.dumps({"text": text}) for kind, text in texts if kind is wanted and text.strip()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = trainers.BpeTrainer(vocab_size=MODEL["vocab_size"], special_tokens=["<|end|>"], show_progress=False,
                               initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    raw.train_from_iterator((text for kind, text in texts if kind), made)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>").save_pretrained(folder / "tokenizer")


def train(folder: Path, prepared: Path, name: str, more: list[str]) -> dict[str, float]:
    """One run; what it ended with."""
    run = json.loads(json.dumps(RUN)) | KINDS[name] | {"output": str(folder / name.replace(" ", "-").replace(",", ""))}
    run["model"]["tokenizer"] = str(prepared / "tokenizer")
    run["data"] |= {part: str(prepared / f"{part}.jsonl") for part in ("train", "eval")}
    file = folder / f"{name.replace(' ', '-').replace(',', '')}.yaml"
    file.write_text(json.dumps(run))  # JSON is YAML
    command = [sys.executable, "-m", "shardwise", "train", str(file), *more]
    job = subprocess.run(command, capture_output=True, text=True)
    if job.returncode:
        raise SystemExit(f"{name}: {job.stdout[-2000:]}{job.stderr[-2000:]}")
    records = [json.loads(line) for line in (Path(run["output"]) / "metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in records if one["kind"] == "train"]
    held = [one["loss"] for one in records if one["kind"] == "eval"]
    return {
        "steps": len(losses),
        "first": losses[0],
        "last": sum(losses[-20:]) / len(losses[-20:]),
        "held_out": held[-1],
    }


def main() -> None:
    out, *more = sys.argv[1:]
    kept = more.pop(more.index("--folder") + 1) if "--folder" in more else None
    kinds = [kind for kind in KINDS if kind in more] or list(KINDS)
    more = [one for one in more if one not in KINDS and one != "--folder"]
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        prepared = folder if kept is None else Path(kept)
        prepared.mkdir(parents=True, exist_ok=True)
        if not (prepared / "tokenizer").exists():
            prepare(prepared)
        if not kinds or more == ["prepare"]:
            return
        with ThreadPoolExecutor() as pool:
            results = dict(zip(kinds, pool.map(lambda kind: train(folder, prepared, kind, more), kinds), strict=True))
    Path(out).write_text(json.dumps(results, indent=1))
    for name, result in results.items():
        beside = {key: result[key] / results["bf16"][key] - 1 for key in ("last", "held_out") if "bf16" in results}
        print(name, result, {key: f"{value:+.2%}" for key, value in beside.items()}, flush=True)


if __name__ == "__main__":
    main()
