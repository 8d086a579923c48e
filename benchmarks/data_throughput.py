"""From a file of conversations to packed, masked sequences: how fast, and in how much memory, beside TRL and Axolotl.

    python benchmarks/data_throughput.py make --rows 200000 --file /tmp/chats.jsonl
    python benchmarks/data_throughput.py ours --file /tmp/chats.jsonl
    PEER/bin/python benchmarks/data_throughput.py trl --file /tmp/chats.jsonl --tokenizer FOLDER
    PEER/bin/python benchmarks/data_throughput.py axolotl --file /tmp/chats.jsonl     # its sampler alone

Each prints one line of JSON. PEER is an environment with trl (and datasets) or axolotl; FOLDER is where `ours` stored
the tokenizer, with marks of what the assistant says added to its template, since TRL's mask needs them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

LENGTH = 2048
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + "
    "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Peak:
    """The most memory that this process and its children held at once: private pages, not files that are mapped."""

    def __init__(self) -> None:
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    info = process.memory_full_info()
                    total += info.uss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def make(file: Path, rows: int) -> None:
    """Conversations of 1 to 4 exchanges: passages of documentation, of lengths that are spread as real ones are."""
    rng = random.Random(0)
    words = _documentation()

    def passage(mean: float) -> str:
        size = _size(rng, mean)
        at = rng.randrange(len(words) - size)
        return " ".join(words[at : at + size])

    with file.open("w") as out:
        for _ in range(rows):
            messages = []
            if rng.random() < 0.3:
                messages.append({"role": "system", "content": passage(2.5)})
            for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
                messages.append({"role": "user", "content": passage(2.8)})
                messages.append({"role": "assistant", "content": passage(4.0)})
            out.write(json.dumps({"messages": messages}) + "\n")


def _documentation() -> list[str]:
    """The words of all docstrings of the standard library and the installed packages, with their line breaks."""
    words: list[str] = []
    for folder in {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]}:
        for source in sorted(Path(folder).rglob("*.py")):
            try:
                tree = ast.parse(source.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError, OSError, RecursionError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    words += (ast.get_docstring(node) or "").replace("<", "< ").split(" ")
            if len(words) > 3_000_000:
                return words
    return words


def _size(rng: random.Random, mean: float) -> int:
    return min(350, max(1, int(rng.lognormvariate(mean, 0.8))))


def ours(file: Path, workers: int, tokenizer_folder: Path | None) -> dict[str, Any]:
    """Our preparation, cold, in an empty cache, and the packing of an epoch."""
    from shardwise.config.load import load_run
    from shardwise.nn.models.source import find_model

    cache = Path(tempfile.mkdtemp(prefix="shardwise-bench-"))
    models = Path(os.environ.get("SHARDWISE_CACHE", "~/.cache/shardwise")).expanduser() / "models"
    if models.is_dir():
        (cache / "models").symlink_to(models)
    os.environ["SHARDWISE_CACHE"] = str(cache)
    run = load_run({
        "model": "smollm2-135m-instruct", "output": str(cache / "out"),
        "data": {"train": str(file), "sequence_length": LENGTH, "workers": workers, "over_length": "truncate"},
    }, []).run  # fmt: skip
    tokenizer = find_model(run.model).load_tokenizer()
    tokenizer.chat_template = CHATML
    if tokenizer_folder:
        tokenizer.save_pretrained(tokenizer_folder)
    from shardwise.data.layout import CausalLayout
    from shardwise.data.loader import Loader
    from shardwise.data.mixing import SourceStream
    from shardwise.data.prepare import prepare_data

    with Peak() as peak:
        started = time.perf_counter()
        prepared = prepare_data(run.data, tokenizer, 0)
        tokenised = time.perf_counter()
        stream = SourceStream("chats", prepared.train[0].store)
        loader = Loader([stream], LENGTH, True, run.data.packing_window, 0, CausalLayout(0))
        sequences = loader.epoch_sequences()
        packed = time.perf_counter()
    facts = prepared.train[0].facts or {}
    shutil.rmtree(cache)
    return {
        "system": "shardwise", "rows": facts["rows"], "tokens": facts["tokens"], "supervised": facts["supervised"],
        "tokenise_seconds": round(tokenised - started, 2), "pack_seconds": round(packed - tokenised, 2),
        "rows_per_second": round(facts["rows"] / (packed - started)), "sequences": sequences,
        "efficiency": round(facts["tokens"] / sequences / LENGTH, 4), "peak_gib": round(peak.bytes / 2**30, 3),
    }  # fmt: skip


def trl(file: Path, workers: int, folder: Path) -> dict[str, Any]:
    """TRL's preparation as its trainer does it: tokenised with the assistant's mask and packed (best fit)."""
    from datasets import disable_caching, load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    work = Path(tempfile.mkdtemp(prefix="trl-bench-"))
    args = SFTConfig(
        output_dir=str(work), packing=True, packing_strategy="bfd", assistant_only_loss=True, max_length=LENGTH,
        dataset_num_proc=workers, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    with Peak() as peak:
        started = time.perf_counter()
        data = load_dataset("json", data_files=str(file), split="train", cache_dir=str(work / "cache"))
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        seconds = time.perf_counter() - started
    packed = trainer.train_dataset
    tokens, masks = 0, 0
    for batch in packed.with_format("numpy").iter(1000):
        tokens += sum(len(ids) for ids in batch["input_ids"])
        if "assistant_masks" in batch:
            masks += sum(int(m.sum()) for m in batch["assistant_masks"])
        else:
            masks += sum(int((labels != -100).sum()) for labels in batch["labels"])
    rows, sequences = len(data), len(packed)
    shutil.rmtree(work)
    return {
        "system": "trl", "rows": rows, "tokens": tokens, "supervised": masks, "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds), "sequences": sequences,
        "efficiency": round(tokens / sequences / LENGTH, 4), "peak_gib": round(peak.bytes / 2**30, 3),
    }  # fmt: skip


def axolotl(count: int) -> dict[str, Any]:
    """Axolotl's sampler and our packing on the same lengths (log-normal, up to a sequence)."""
    import numpy as np
    from axolotl.utils.samplers.multipack import MultipackBatchSampler
    from torch.utils.data import RandomSampler

    from shardwise.config.schema import Data
    from shardwise.data.packing import best_fit

    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, count), 8, LENGTH).astype(np.int64)
    theirs = []
    for _ in range(2):  # the first one compiles
        started = time.perf_counter()
        sampler = MultipackBatchSampler(
            RandomSampler(range(count)), batch_size=1, batch_max_len=LENGTH, lengths=lengths, bin_size=200,
            drop_last=False, num_processes=2,
        )  # fmt: skip
        batches = list(sampler)
        theirs.append(time.perf_counter() - started)
    bins = sum(len(batch) for batch in batches)
    started = time.perf_counter()
    window = Data.model_fields["packing_window"].default
    sequences = sum(int(best_fit(lengths[at : at + window], LENGTH).max()) + 1 for at in range(0, count, window))
    ours_seconds = time.perf_counter() - started
    total = int(lengths.sum())
    return {
        "documents": count, "axolotl_seconds": round(theirs[-1], 2), "axolotl_efficiency": total / bins / LENGTH,
        "our_seconds": round(ours_seconds, 2), "our_efficiency": total / sequences / LENGTH,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "ours", "trl", "axolotl"])
    parser.add_argument("--file", type=Path, default=Path("/tmp/shardwise-chats.jsonl"))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    if args.what == "make":
        make(args.file, args.rows)
    elif args.what == "ours":
        print(json.dumps(ours(args.file, args.workers, args.tokenizer)))
    elif args.what == "trl":
        print(json.dumps(trl(args.file, args.workers, args.tokenizer)))
    else:
        print(json.dumps(axolotl(args.rows)))


if __name__ == "__main__":
    main()
