"""The model card: what the model is, what it was trained on, how, and how well it does."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwise.export.facts import CardFacts
from shardwise.export.markdown import table, text

CURVE = "loss.svg"
PIPELINES = {
    "causal": "text-generation", "seq2seq": "text2text-generation", "masked": "fill-mask",
    "classify": "text-classification",
}  # fmt: skip


def make_card(
    facts: CardFacts, name: str, task: str, kind: str, library: str = "transformers", checked: Sequence[str] = ()
) -> str:
    """Returns the card as Markdown with a YAML header; `kind` is the dtype of the weights, `library` loads them."""
    method = dict(facts.settings).get("method.type", "full")
    parts = [
        _front(facts, task, library, method),
        f"# {text(name)}",
        _about(facts, task, kind, method),
        "## Use", _use(name, task, library),
        *(["## Data", _data(facts)] if facts.sources else []),
        "## Training", _training(facts),
        *(["## Evaluation", _evaluation(facts)] if facts.results else []),
        *(["## Check of the export", "\n".join(f"- {text(line, 1500)}." for line in checked)] if checked else []),
        "## Environment", _environment(),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def write_card(folder: Path, facts: CardFacts, card: str) -> None:
    """Writes README.md and the loss curve that it shows."""
    (folder / "README.md").write_text(card, encoding="utf-8")
    if (curve := loss_svg(facts.records)) is not None:
        (folder / CURVE).write_text(curve, encoding="utf-8")


def _front(facts: CardFacts, task: str, library: str, method: str) -> str:
    import yaml

    head: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": PIPELINES[task],
        "tags": ["shardwise", *([method] if method != "full" else []), *(["gguf"] if library == "gguf" else [])],
    }
    head |= {"base_model": facts.base} if facts.base else {}
    head |= {"license": facts.license} if facts.license else {}
    head |= {"datasets": facts.datasets} if facts.datasets else {}
    return "---\n" + yaml.safe_dump(head, allow_unicode=True, sort_keys=False) + "---"


def _about(facts: CardFacts, task: str, kind: str, method: str) -> str:
    origin = f"fine-tuned from {text(facts.base or facts.base_name)}" if facts.base_name else "trained from scratch"
    method_text = "" if method == "full" else f" with {text(method)}"
    steps = f", {facts.step:,} steps" if facts.step is not None else ""
    return f"A model for {PIPELINES[task].replace('-', ' ')}, {origin}{method_text}{steps}; weights in {text(kind)}."


def _use(name: str, task: str, library: str) -> str:
    where = "".join(c for c in name if c.isalnum() or c in "-_.") or "model"
    if library == "gguf":
        return f"```bash\nllama-cli -m {where}\n```"
    classes = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM", "masked": "AutoModelForMaskedLM",
               "classify": "AutoModelForSequenceClassification"}  # fmt: skip
    chat = f"```bash\nshardwise chat {where}\n```\n\n" if task == "causal" else ""
    if library == "peft":
        peft = "AutoPeftModelForCausalLM"
        return f"{chat}```python\nfrom peft import {peft}\n\nmodel = {peft}.from_pretrained({where!r})\n```"
    return (
        f"{chat}```python\nfrom transformers import {classes[task]}, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({where!r})\nmodel = {classes[task]}.from_pretrained({where!r})\n```"
    )


def _data(facts: CardFacts) -> str:
    rows = [
        (source.get("name", "?"), source.get("format", "?"), _count(source.get("rows")), _count(source.get("tokens")),
         _percent(source.get("learned_share")), _count(source.get("left_out")), _count(source.get("held_out")))
        for source in facts.sources
    ]  # fmt: skip
    head = ("source", "format", "rows", "tokens", "learned", "rows left out", "held out")
    fates = [
        f"- {text(source.get('name', '?'))}: "
        + ", ".join(f"{_count(n)} {text(fate)}" for fate, n in source["fates"].items())
        for source in facts.sources
        if isinstance(source.get("fates"), dict) and source["fates"]
    ]
    fates_text = "What became of rows that did not go in as they are:\n\n" + "\n".join(fates) if fates else ""
    return "\n\n".join(part for part in (table(head, rows), fates_text) if part)


def _training(facts: CardFacts) -> str:
    rows = []
    for kind, label in (("train", "training"), ("eval", "held out")):
        records = [record for record in facts.records if record.get("kind") == kind]
        for record in records[-1:]:
            rows.append((f"{label}, all", _loss(record.get("loss"))))
            sources = record.get("losses")
            rows += [(f"{label}, {n}", _loss(v)) for n, v in sources.items()] if isinstance(sources, dict) else []
    parts = [table(("last loss", "value"), rows)] if rows else []
    if loss_svg(facts.records) is not None:
        parts.append(f"![loss by step]({CURVE})")
    if facts.tokens:
        parts.append(f"{facts.tokens:,} tokens were seen.")
    if facts.settings:
        parts.append("Settings other than the defaults:\n\n" + table(("setting", "value"), facts.settings))
    return "\n\n".join(parts) or "Nothing is recorded."


def _evaluation(facts: CardFacts) -> str:
    """Results as they are: whatever is a name, a metric or a number."""
    names = dict.fromkeys(name for result in facts.results for name in result)
    keys = [name for name in names if _shown(facts.results, name)]
    rows = [[_cell(result.get(key, "")) for key in keys] for result in facts.results]
    return table(keys and [text(key) for key in keys], rows) if keys else ""


def _shown(results: list[dict[str, Any]], key: str) -> bool:
    private = "path" in key or "file" in key
    return not private and any(isinstance(result.get(key), (str, int, float)) for result in results)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and ("/" in value or "\\" in value):
        from shardwise.export.facts import last_part

        return last_part(value)
    return str(value) if isinstance(value, (str, int)) else ""


def _environment() -> str:
    import safetensors
    import torch
    import transformers

    from shardwise import __version__

    versions = [
        ("shardwise", __version__), ("torch", torch.__version__), ("transformers", transformers.__version__),
        ("safetensors", safetensors.__version__), ("Python", platform.python_version()),
    ]  # fmt: skip
    return table(("software", "version"), versions)


def loss_svg(records: list[dict[str, Any]], width: int = 640, height: int = 240) -> str | None:
    """Returns the losses by step as a small SVG; None if there are none."""
    lines: dict[str, list[tuple[int, float]]] = {"train": [], "eval": []}
    for record in records:
        if record.get("kind") in lines and _finite(record.get("loss")):
            lines[record["kind"]].append((int(record["step"]), float(record["loss"])))
    points = [p for line in lines.values() for p in line]
    if len(points) < 2:
        return None
    steps = [s for s, _ in points]
    losses = [v for _, v in points]
    low = min(losses)
    high = max(losses)
    first = min(steps)
    last = max(steps)

    def point(step: int, value: float) -> str:
        x = 50 + (step - first) / max(1, last - first) * (width - 60)
        return f"{x:.1f},{height - 30 - (value - low) / ((high - low) or 1.0) * (height - 50):.1f}"

    curves = []
    for kind, colour in (("train", "#4477aa"), ("eval", "#cc6633")):
        line = lines[kind][:: max(1, len(lines[kind]) // 500)] + lines[kind][-1:]
        path = " ".join(point(*p) for p in line)
        curves.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
    labels = [(4, 24, f"{high:.3g}"), (4, height - 30, f"{low:.3g}"), (50, height - 8, f"step {first:,}"),
              (width - 90, height - 8, f"step {last:,}")]  # fmt: skip
    labels_svg = "".join(f'<text x="{x}" y="{y}">{escape(label)}</text>' for x, y, label in labels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><title>Loss by step: training and held out</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(curves)}{labels_svg}</svg>'
    )


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _loss(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "not finite"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _percent(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "?"
