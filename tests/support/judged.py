"""Judged answers for tests: rows, batches made by hand, and what a rank does with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.packing import DOCUMENT
from shardwise.data.store import LEARNED
from shardwise.nn.objective import prepared
from support.ranks import run_ranks
from support.tiny import PAIRS, tiny_run, tokenizer_folder

WORDS = 515
PATIENCE = 1800  # seconds: several runs in one start of processes, on a machine that may be busy


def rows(count: int = 24) -> list[tuple[str, str, str]]:
    """Prompt, good answer, bad answer (the end of another row's)."""
    found = []
    for line in PAIRS.read_text().splitlines():
        said = {m["role"]: m["content"] for m in json.loads(line)["messages"]}
        found.append((said["user"][:60], said["assistant"][:70]))
    return [(q, a, found[-1 - i][1][:40] + "!") for i, (q, a) in enumerate(found[:count])]


def preference_file(folder: Path, count: int = 24, name: str = "pairs") -> str:
    """Pairs as a file."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(dict(prompt=q, chosen=a, rejected=b)) + "\n" for q, a, b in rows(count)))
    return str(file)


def kto_file(folder: Path, count: int = 12) -> str:
    """The same answers one by one."""
    file = folder / "kto.jsonl"
    judged = [(q, a, good) for q, right, wrong in rows(count) for a, good in ((right, True), (wrong, False))]
    file.write_text("".join(json.dumps(dict(prompt=q, completion=a, label=g)) + "\n" for q, a, g in judged))
    return str(file)


def judged_run(folder: Path, objective: Any, **changes: Any) -> dict[str, Any]:
    """A run over one of these files."""
    tokenizer_folder(folder / "tokenizer")
    kind = objective if isinstance(objective, str) else objective["type"]
    file = kto_file(folder) if kind == "kto" else preference_file(folder)
    own = {"data__train": file, "data__sequence_length": 512, "train__batch_size": 4, "train__steps": 4}
    return tiny_run(folder, objective=objective, **own | {"train__learning_rate": 1e-3} | changes)


class Hand:
    """A reader of documents that are made by hand."""

    def __init__(self, documents: Sequence[np.ndarray], packing: bool, sources: Sequence[int] = ()) -> None:
        self.packing, self.source_count, self._documents = packing, max([0, *sources]) + 1, documents
        self._sources = sources or [0] * len(documents)

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        return self._documents[index]

    def sequences(self, *layout: Sequence[int]) -> list[np.ndarray]:
        """Sequences of these documents, by number."""
        return [
            np.array([(self._sources[i], 0, i, len(self._documents[i]), 0) for i in row], dtype=DOCUMENT)
            for row in layout
        ]


def conversation(prompt: int, answer: int, draw: np.random.Generator) -> np.ndarray:
    """Random tokens, the answer's learned."""
    tokens = draw.integers(0, WORDS, prompt + answer).astype(np.uint32)
    tokens[prompt:] |= LEARNED
    return tokens


def pair(prompt: int, chosen: int, rejected: int, draw: np.random.Generator) -> np.ndarray:
    """A pair as it is stored."""
    both = [conversation(prompt, chosen, draw), conversation(prompt, rejected, draw)]
    return np.concatenate([np.array([len(both[0])], dtype=np.uint32), *both])


def apart(documents: Sequence[np.ndarray], kto: bool = False) -> list[np.ndarray]:
    """The conversations of stored documents."""
    cuts = [[d[1:]] if kto else [d[1 : 1 + d[0]], d[1 + d[0] :]] for d in documents]
    return [one for cut in cuts for one in cut]


def plain_log_prob(model: Any, marked: np.ndarray) -> tuple[torch.Tensor, int]:
    """Reference: the log-probability of a conversation's answer, on its own, and its tokens."""
    ids, learned = torch.from_numpy((marked & ~LEARNED).astype(np.int64)), torch.from_numpy(marked >= LEARNED)
    log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return (log_p.gather(1, ids[1:, None])[:, 0] * learned[1:]).sum(), int(learned.sum())


def as_reference(model: Any) -> Any:
    """A seam that asks this model, whatever is trained."""

    def reference(batches: list[Any], compute: Any, absent: Any) -> list[Any]:
        with torch.no_grad():
            return [compute(model, batch) for batch in batches]

    return reference


def loss_of(objective: Any, model: Any, batch: Any) -> Any:
    """The loss of a micro-batch, after the second model has been asked."""
    return objective(model, *prepared(objective, [batch]))


def start(function: Any, ranks: int, *args: Any) -> list[Any]:
    """On ranks, with more patience than one run needs."""
    return run_ranks(function, ranks, *args, timeout=PATIENCE)


# On ranks


def all_of(runs: dict[str, dict[str, Any]]) -> dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]]:
    """Runs each to its end; the records, and the trained parameters."""
    from safetensors.torch import load_file

    return {n: (_records(run), load_file(Path(run["output"]) / "model/model.safetensors")) for n, run in runs.items()}


def records_of(runs: dict[str, dict[str, Any]], copied: bool = False) -> dict[str, list[dict[str, float]]]:
    """Runs each to its end; the records. `copied`: with a frozen copy for reference where a base would do."""
    from shardwise.objectives import reference

    if copied:
        reference.needs_copy = lambda run: True
    return {name: _records(run) for name, run in runs.items()}


def taught(runs: dict[str, dict[str, Any]], again: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs that learn from a teacher, then others in which there is none to be asked."""
    from shardwise.objectives import distill

    def refuse(*_: Any) -> Any:
        raise AssertionError("the teacher was asked again")

    found = all_of(runs)
    distill.load_teacher = refuse
    return found | all_of(again)


def _records(run: dict[str, Any]) -> list[dict[str, float]]:
    from shardwise.observe.metrics import read_metrics
    from shardwise.train.loop import fit
    from support.scenarios import parts_of

    fit(parts_of(run))
    return [r for r in read_metrics(Path(run["output"]) / "metrics.jsonl") if r["kind"] == "train"]
