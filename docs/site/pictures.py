"""The pictures of docs/concepts.md: what a rank holds and sends, measured on the code that trains.

    python docs/site/pictures.py measure [FIGURE…]   # rehearses each cell (minutes), writes docs/site/bytes.json
    python docs/site/pictures.py draw                # bytes.json → docs/pictures/*.svg and the tables of concepts.md

A cell is one rank's step, rehearsed: the real set-up, forward, backward and update on tensors without memory, which
hold and send to the byte what real ranks do (tests/foresight/rehearse). Two micro-batches or more, so that there are
sums of gradients.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import formulas  # noqa: E402
from drawing import GIB, picture  # noqa: E402

DATA, PICTURES, PAGE = HERE / "bytes.json", HERE.parent / "pictures", HERE.parent / "concepts.md"
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
    "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
LENGTH = 2048

# Figure: title, ranks, ranks of a node, cells (label: settings; "rank" and "ranks" are not RUN.yaml's).
ZERO3 = {"parallel.zero": 3}
AXES = {"parallel.zero": 0, "train.batch_size": 8}
CPU, DISK = "offload.optimizer", "offload.parameters"
FIGURES: dict[str, tuple[str, int, int, dict[str, dict[str, Any]]]] = {
    "stages": ("ZeRO stages", 8, 8, {f"stage {n}": {"parallel.zero": n} for n in range(4)}),
    "hybrid": ("Hybrid sharding", 8, 4, {
        "stage 3 over 8": ZERO3, "stage 3 over 4, twice": ZERO3 | {"parallel.dp_shard_size": 4},
    }),
    "zeror": ("ZeRO-R", 8, 8, {
        "stage 3": ZERO3,
        "recompute": ZERO3 | {"recompute": "full"},
        "recompute, inputs on the host": ZERO3 | {"recompute": "full", "offload.activations": "cpu"},
        "recompute, inputs over 2 tensor ranks": ZERO3 | {"recompute": "full", "parallel.tensor": 2},
        "recompute, buckets of 50 MB": ZERO3 | {"recompute": "full", "advanced.bucket": "50MB"},
    }),
    "offload": ("ZeRO-Offload", 2, 2, {
        "stage 2": {"parallel.zero": 2},
        "optimizer on the host": {"parallel.zero": 2, CPU: "cpu"},
        "8-bit optimizer on the host": {"parallel.zero": 2, CPU: "cpu", "train.optimizer": "adamw8bit"},
    }),
    "infinity": ("ZeRO-Infinity", 2, 2, {
        "stage 3": ZERO3,
        "all on the host": ZERO3 | {CPU: "cpu", DISK: "cpu"},
        "all on disk": ZERO3 | {CPU: "disk", DISK: "disk"},
    }),
    "zeropp": ("ZeRO++", 8, 4, {
        "stage 3": ZERO3,
        "hpZ": ZERO3 | {"parallel.hpz_size": 4},
        "qwZ": ZERO3 | {"parallel.quantize_weights": True},
        "qgZ": ZERO3 | {"parallel.quantize_gradients": True},
        "hpZ + qwZ + qgZ": ZERO3 | {"parallel.hpz_size": 4, "parallel.quantize_weights": True,
                                    "parallel.quantize_gradients": True},
    }),
    "data": ("Data parallel", 4, 4, {
        "1 rank": AXES | {"ranks": 1}, "4 ranks, stage 0": AXES, "4 ranks, stage 3": AXES | ZERO3,
    }),
    "tensor": ("Tensor and sequence parallel", 4, 4, {
        "1 rank": AXES | {"ranks": 1}, "tensor 2": AXES | {"parallel.tensor": 2, "ranks": 2},
        "tensor 4": AXES | {"parallel.tensor": 4},
    }),
    "context": ("Context parallel", 4, 4, {
        "1 rank": AXES | {"ranks": 1}, "ring of 4": AXES | {"parallel.context": 4},
        "Ulysses over 4": AXES | {"parallel.context": 4, "parallel.context_kind": "ulysses"},
    }),
    "pipeline": ("Pipeline parallel", 4, 4, {
        "1 rank": AXES | {"ranks": 1}, "first of 4 stages": AXES | {"parallel.pipeline": 4},
        "second of 4 stages": AXES | {"parallel.pipeline": 4, "rank": 1},
        "last of 4 stages": AXES | {"parallel.pipeline": 4, "rank": 3},
    }),
    "expert": ("Expert parallel", 4, 4, {
        "1 rank": AXES | {"ranks": 1}, "4 ranks, stage 0": AXES, "expert 4": AXES | {"parallel.expert": 4},
    }),
}  # fmt: skip


def measured(figure: str, label: str) -> dict[str, Any]:
    """One cell: bytes that a rank holds at the peak of its step, by what they are for, and sends, by collective."""
    from shardwise.foresight.rehearse.subprocess import run_isolated

    _, ranks, node, cells = FIGURES[figure]
    settings = dict(cells[label])
    ranks, rank = settings.pop("ranks", ranks), settings.pop("rank", 0)
    model = EXPERTS if figure == "expert" else LLAMA
    found: dict[str, Any] = run_isolated(_cell, model, settings, ranks, rank, node)
    return found


def _cell(model: dict[str, Any], settings: dict[str, Any], ranks: int, rank: int, node: int) -> dict[str, Any]:
    import shardwise.core.effective_device
    import shardwise.parallel.zero.plusplus
    from shardwise.config.load import load_run
    from shardwise.config.paths import place
    from shardwise.foresight.rehearse.step import Alike, rehearse
    from shardwise.foresight.rehearse.target import aim

    values: dict[str, Any] = {
        "model": {"config": model, "tokenizer": "none"}, "data": {"train": "none", "sequence_length": LENGTH},
        "objective": "causal", "precision": "bf16", "device": "cuda", "recompute": "none", "output": "none",
        "train": {"batch_size": 2 * ranks, "micro_batch_size": 1, "steps": 1},
        "advanced": {"master_weights": "fp32"},
    }  # fmt: skip
    for key, value in settings.items():
        place(values, key, value)
    if "offload.optimizer" in settings:
        del values["advanced"]["master_weights"]  # in two halves then
    target = aim(load_run(values), 1, ranks)
    shardwise.parallel.zero.plusplus.ranks_per_node = lambda *_: node  # type: ignore[attr-defined]  # hosts that are not there
    files, mapped = _followed_files()
    known = Alike()
    for one in sorted({0, rank}):  # the first stage tells the others what is handed on
        result = rehearse(target.source, target.run, one, ranks, target.micro_batches, known=known)
    parameters = sum(p.numel() for p in _whole(target.source))
    told = _told(result.tracker, parameters, rank, node)
    told["host"] = sum(storage.nbytes() for storage in shardwise.core.effective_device._HOST if storage not in mapped)
    told["disk"] = sum(files)
    return told | {"parameters": parameters, "ranks": ranks, "rank": rank, "micro_batches": result.micro_batches}


def _followed_files() -> tuple[list[int], Any]:
    """Sizes of the files that will be made, and what of the host's memory stands for them."""
    import weakref

    from shardwise.foresight.rehearse.nodisk import NoDisk, NoFile

    files: list[int] = []
    mapped: Any = weakref.WeakSet()
    create, view = NoDisk.create, NoFile.mapped

    def created(disk: NoDisk, name: str, size: int) -> NoFile:
        files.append(size)
        return create(disk, name, size)

    def viewed(file: NoFile, offset: int, size: int) -> Any:
        made = view(file, offset, size)
        mapped.add(made.untyped_storage())
        return made

    NoDisk.create, NoFile.mapped = created, viewed  # type: ignore[method-assign]
    return files, mapped


def _whole(source: Any) -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return list(AutoModelForCausalLM.from_config(source.config).parameters())


def _told(tracker: Any, parameters: int, rank: int, node: int) -> dict[str, Any]:
    from shardwise.foresight.rehearse.ledger import ledger_of
    from shardwise.foresight.rehearse.tally import head_of

    ledger = ledger_of(tracker, head_of(tracker))
    begun = [time for time, kind, number in tracker.borders if (kind, number) == ("forward", 0)]
    held: Counter[str] = Counter()
    for block, category in ledger.blocks:
        if block.born < ledger.peak_time and (block.died is None or block.died > ledger.peak_time):
            held[_kind(block, category, ledger.peak_time, begun)] += block.size
    sent: Counter[str] = Counter()
    across = 0
    for _, _, one in tracker.collectives:
        if one.kind.startswith("recv"):
            continue  # a rank sends what another receives
        sent[one.kind.rstrip("_")] += one.bytes
        across += round(one.bytes * sum(r // node != rank // node for r in one.ranks) / len(one.ranks))
    return {"held": dict(held), "peak": ledger.peak, "sent": dict(sent), "across": across}


def _kind(block: Any, category: str, peak: int, begun: list[int]) -> str:
    """The ledger's categories, fewer; sums of gradients and FSDP's copies on one rank are told apart."""
    left = any(block.born < start <= peak for start in begun)  # over from an earlier micro-batch
    if not begun:  # a stage of a pipeline has no such border
        left = block.operator == "_to_copy"
    if block.phase == "backward" and left:
        return "gradients"
    if category == "activations" and block.operator == "copy_":
        return "gathered"  # of a group of one there is nothing to gather: the weights are cast
    return {"buffers": "parameters", "communication": "buffers", "temporary": "buffers"}.get(category, category)


def measure(names: list[str]) -> None:
    """Every cell of these figures (all if none is named) anew."""
    import torch
    import transformers

    import shardwise

    data = json.loads(DATA.read_text()) if DATA.exists() else {"figures": {}}
    for figure in names or FIGURES:
        data["figures"][figure] = {}
        for label in FIGURES[figure][3]:
            data["figures"][figure][label] = found = measured(figure, label)
            print(
                f"{figure}, {label}: {found['peak'] / GIB:.2f} GiB, {sum(found['sent'].values()) / GIB:.2f} sent",
                flush=True,
            )
    data["made"] = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__,
        "shardwise": shardwise.__version__,
    }  # fmt: skip
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def drawn(data: dict[str, Any], page: str) -> tuple[dict[str, str], str]:
    """The pictures by name, and the page with its tables made anew."""
    pictures = {}
    for figure, (title, ranks, node, _) in FIGURES.items():
        cells = data["figures"][figure]
        nodes = ranks > node
        pictures[figure] = picture(title, _caption(figure, cells, ranks, node, data["made"]), cells, nodes)
        begin, end = f"<!-- bytes: {figure} -->", f"<!-- end of {figure} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{formulas.table(figure, cells)}\n{end}{rest.split(end)[1]}"
    return pictures, page


def _caption(figure: str, cells: dict[str, Any], ranks: int, node: int, made: dict[str, str]) -> str:
    size = next(iter(cells.values()))["parameters"]
    model = "Mixture of 32 experts" if figure == "expert" else "Llama"
    counts = sorted({cell["micro_batches"] for cell in cells.values()})
    many = f"{ranks} ranks" + (f" on {ranks // node} nodes" if ranks > node else "")
    several = " or ".join(map(str, counts))
    batch = f"{several} micro-batches of 1\u00a0×\u00a0{LENGTH:,} tokens"
    return f"{model} of {size / 1e9:.2f}B, bf16, {many}, {batch}; torch {made['torch']}, {made['date']}"


def draw() -> None:
    """bytes.json as pictures and tables."""
    pictures, page = drawn(json.loads(DATA.read_text()), PAGE.read_text())
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures.items():
        (PICTURES / f"{name}.svg").write_text(text)
    PAGE.write_text(page)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2:])
    elif sys.argv[1:] == ["draw"]:
        draw()
    else:
        sys.exit(__doc__)
