"""What a model card says about a run, gathered from the files that the run left; nothing private is included.

Of paths only the last part is shown: where things lay on somebody's disk is nobody's business. Settings that could hold
a secret are dropped by name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.redact import SECRET_SETTING
from shardwise.data.statistics import SourceStatistics
from shardwise.nn.models.source import EMBEDDED
from shardwise.observe.metrics import read_metrics

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun

DATA = "data.json"
SAMPLES = 4  # documents whose first tokens are kept for the check of an export
LENGTH = 64
KNOWN = {EMBEDDED: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
LEFT_OUT = (
    "output",
    "resume",
    "log.",
    "timeout",
    "checkpoint.",
    "offload.disk",
    "export.check",
    "data.train.",
    "data.eval",
)


@dataclass(frozen=True)
class CardFacts:
    """A run as its card needs it."""

    base: str | None = None  # hub id of the model it started from
    base_name: str | None = None  # what the run called it, without folders
    license: str | None = None
    datasets: list[str] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)
    step: int | None = None
    tokens: int | None = None
    sources: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)


def write_data(job: ResolvedRun) -> None:
    """Writes the statistics of the run's sources, and a few token sequences to compare exports on."""
    from shardwise.data.mixing import source_names

    sources = []
    samples = []
    names = source_names([source.spec.source for source in job.data.train])
    for name, source in zip(names, job.data.train, strict=True):
        if source.facts is None:
            continue  # a run that ended before its data were read
        held_out = source.facts.get("held_out", 0)
        sources.append(SourceStatistics.from_facts(source.spec.source, name, source.facts, held_out=held_out).to_json())
        document_count = len(source.store.table(0)) if source.store.has(0) else 0
        samples += [source.store.document(0, i)[0][:LENGTH].tolist() for i in range(min(document_count, SAMPLES))]
    chosen = samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]
    (job.output / DATA).write_text(json.dumps({"train": sources, "samples": chosen}))


def read_samples(output: Path | None) -> list[list[int]]:
    """Returns the token sequences that a run left for comparisons; empty if there are none."""
    stored = _read(output / DATA if output else None).get("samples")
    return [[int(i) for i in sequence] for sequence in stored] if isinstance(stored, list) else []


def output_of(checkpoint: Path) -> Path | None:
    """Returns the output folder that a checkpoint lies in."""
    output = checkpoint.absolute().parent.parent
    return output if (output / "metrics.jsonl").is_file() else None


def gather(run: dict[str, Any], output: Path | None, step: int | None = None) -> CardFacts:
    """Returns everything known about a run, up to a step."""
    base, name, license_ = _base(run)
    data = _read(output / DATA if output else None)
    metrics = read_metrics(output / "metrics.jsonl") if output and (output / "metrics.jsonl").is_file() else []
    records = [r for r in metrics if step is None or r.get("step", 0) <= step]
    results = _read(output / "eval" / "results.json" if output else None).get("results")
    sources = data.get("train")
    tokens_per_record = [
        r["tokens"] for r in records if r.get("kind") == "train" and isinstance(r.get("tokens"), (int, float))
    ]
    return CardFacts(
        base, name, license_, _datasets(run), _settings(run), step, int(sum(tokens_per_record)) or None,
        [entry for entry in sources if isinstance(entry, dict)] if isinstance(sources, list) else [],
        records,
        [entry for entry in results if isinstance(entry, dict)] if isinstance(results, list) else [],
    )  # fmt: skip


def _read(file: Path | None) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _base(run: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    name = str((run.get("model") or {}).get("name") or "")
    if not name:
        return None, None, None
    if name.lower() in KNOWN:
        return KNOWN[name.lower()][0], name, KNOWN[name.lower()][1]
    path = Path(name).expanduser()
    hub = HUB_ID.fullmatch(name) is not None and not path.exists()
    return name if hub else None, last_part(name), _license(path, name if hub else None)


def _license(folder: Path, repo: str | None) -> str | None:
    """The license that the base model's own card states."""
    import yaml

    from shardwise.core.bounded_yaml import read_yaml

    card: Path | None = folder / "README.md"
    if repo is not None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(repo, "README.md")
        card = Path(cached) if isinstance(cached, str) else None
    try:
        front = card.read_text().split("---")[1] if card is not None else ""
        stated = read_yaml(front)["license"]
    except (OSError, ValueError, IndexError, KeyError, TypeError, yaml.YAMLError):
        return None
    return str(stated) if isinstance(stated, str) else None


def _datasets(run: dict[str, Any]) -> list[str]:
    paths = [str(source.get("path", "")) for source in (run.get("data") or {}).get("train") or []]
    return sorted({p.removeprefix("hf:") for p in paths if p.startswith("hf:") and HUB_ID.fullmatch(p[3:])})


def last_part(value: str) -> str:
    """Returns a path without its folders."""
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1]


def _public(key: str, value: Any) -> str:
    if isinstance(value, str):
        hub = value.startswith("hf:") or (key.startswith("model.") and HUB_ID.fullmatch(value))
        keep = hub and not Path(value).expanduser().exists()
        return value if keep or not re.search(r"[\\/]", value) else last_part(value)
    if isinstance(value, list):
        return ", ".join(_public(key, item) for item in value)
    return json.dumps(value, ensure_ascii=False)


def _settings(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings that differ from the defaults, including what `auto` resolved to.

    A method and an objective are shown by their type; their settings are compared with the defaults of that type.
    """
    from shardwise.config.advanced import written
    from shardwise.config.methods import METHODS
    from shardwise.config.objectives import OBJECTIVES
    from shardwise.config.paths import flatten
    from shardwise.config.schema import Run

    default_run = Run.model_validate({"model": {"name": "m"}, "data": {"train": "d"}}).model_dump(mode="json")
    alternatives: dict[str, dict[str, Any]] = {"method": METHODS, "objective": OBJECTIVES}
    for section, kinds in alternatives.items():
        kind = run[section].get("type") if isinstance(run.get(section), dict) else None
        if kind in kinds:
            default_run[section] = kinds[kind].model_construct().model_dump(mode="json")
    defaults = dict(flatten(default_run)) | {"model.name": None, "method.type": "full", "objective.type": None}
    return [
        (written(key), _public(key, value))
        for key, value in flatten(run)
        if value != defaults.get(key) and not key.startswith(LEFT_OUT) and not SECRET_SETTING.search(key)
    ]
