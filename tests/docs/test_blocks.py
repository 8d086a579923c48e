"""Blocks of YAML, Python and JSON in README and docs: the schema takes them, they compile, and the quick ones run."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.each import check_each
from support.pages import ROOT, Block, blocks
from support.typed import furnish, rows_of

from shardwise.config.load import load_run
from shardwise.config.schema import Run

BASE: dict[str, Any] = {"model": "tiny", "data": {"train": "chat.jsonl", "sequence_length": 64}}
THEIRS = ("scrape_configs",)  # files of other programs
RUN_HERE = (
    "docs/combinations.md",
    "docs/deepspeed-api.md",
    "docs/library.md",
)  # Python that needs nothing but the package


def where(block: Block) -> str:
    return block.where


def run(code: Any, names: dict[str, Any]) -> None:
    """Executes a block, and leaves no process group behind."""
    import torch.distributed as dist

    try:
        exec(code, names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def alternatives(text: str) -> list[dict[str, Any]]:
    """A block's mapping; where it shows a key several times, one mapping for each, the first with all the rest."""
    parts = [part for part in re.split(r"(?m)^(?=\w)", text) if part.strip() and not part.lstrip().startswith("#")]
    found: list[dict[str, Any]] = [{}]
    for part in parts:
        [(key, value)] = yaml.safe_load(part).items()
        if key in found[0]:
            found.append({key: value})
        else:
            found[0][key] = value
    return found


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v for k, v in over.items()
    }
    return base | both


def test_yaml_is_what_the_schema_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(block: Block) -> None:
        with monkeypatch.context() as patch:
            take_yaml(block, tmp_path, patch)

    check_each(blocks("yaml", "yml"), check, where)


def take_yaml(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    for values in alternatives(textwrap.dedent(block.text)):
        if set(values) <= {*Run.model_fields, "advanced"}:
            assert load_run(merged(BASE, values)).notes == ()  # no old names or places
        elif set(values) <= {"devices", "nodes", "links", "networks"}:
            from shardwise.core.hardware.specs import device_names, find_device

            (tmp_path / "hardware.yaml").write_text(block.text)
            monkeypatch.setenv("SHARDWISE_HARDWARE", str(tmp_path / "hardware.yaml"))
            assert set(values["devices"]) <= set(device_names())
            assert all(find_device(name).memory > 0 for name in values["devices"])
        elif set(values) == {"tasks"}:
            from shardwise.evaluate.settings import read_tasks

            (tmp_path / "eval.yaml").write_text(block.text)
            assert len(read_tasks(tmp_path / "eval.yaml")) == len(values["tasks"])
        else:
            assert set(values) <= set(THEIRS), f"what file has {sorted(values)}?"


def test_a_wrong_key_in_a_block_would_be_noticed() -> None:
    from shardwise.core.errors import UserError

    with pytest.raises(UserError):
        load_run(merged(BASE, alternatives("train: {learning_rat: 1}\n")[0]))
    assert alternatives("a: 1\na: 2\nb: 3\n") == [{"a": 1, "b": 3}, {"a": 2}]


@pytest.mark.parametrize("block", blocks("python"), ids=where)
def test_python_compiles(block: Block) -> None:
    code = compile(block.text, block.where, "exec")
    if block.page in RUN_HERE and "Trainer" not in block.text:
        run(code, {})


@pytest.mark.parametrize("block", blocks("json"), ids=where)
def test_json_is_json(block: Block) -> None:
    assert rows_of(block.text)


@pytest.mark.parametrize("block", [b for b in blocks("json") if b.page == "docs/preference.md"], ids=where)
def test_the_reader_understands_the_rows_of_preference(block: Block) -> None:
    from shardwise.config.schema import Source
    from shardwise.data.examples import Raw
    from shardwise.data.formats import detect, understand

    raws = [Raw(f"line {n}", n, row) for n, row in enumerate(rows_of(block.text))]
    source = Source(path="rows.jsonl")
    detected = detect(raws, source, "data.train[0]", "preference" if "chosen" in block.text else "kto")
    for raw in raws:
        understand(raw, detected, source)


@pytest.mark.slow
def test_the_whole_run_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's and the library page's `Trainer`, and README's loop after it."""
    import torch
    from transformers import AutoModelForCausalLM

    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("tiny")
    rows = torch.randint(0, 500, (2, 16))
    data = [{"input_ids": rows, "labels": rows}] * 4
    for block in blocks("python"):
        if "Trainer(" in block.text:
            code = block.text.replace('"precision": "bf16"', '"precision": "fp32"')  # a CPU's
            run(compile(code, block.where, "exec"), {"model": model, "data": data})
    assert (tmp_path / "out/library/model/config.json").exists() and (tmp_path / "out/run/model/config.json").exists()


@pytest.mark.slow
def test_adapters_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page on methods: two adapters on one base."""
    import torch
    from transformers import AutoModelForCausalLM

    import shardwise

    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("law", "code"):
        shardwise.Trainer("run.yaml", "method=lora", "train.steps=2", f"output=out/{name}").fit()
    [block] = [one for one in blocks("python") if one.page == "docs/methods.md"]
    base = AutoModelForCausalLM.from_pretrained("tiny")
    imports, _, rest = block.text.partition(
        "with torch.no_grad()"
    )  # that part is for a run in training: tests/nn/adapters
    lines = ("load_adapters(" + rest.partition("load_adapters(")[2]).splitlines()
    names: dict[str, Any] = {"model": base}
    inputs = {"input_ids": torch.randint(0, 500, (1, 8))}
    plain = base(**inputs).logits
    exec(compile("\n".join([imports, *lines[:-1]]), block.where, "exec"), names)
    assert not torch.equal(base(**inputs).logits, plain)
    exec(compile(lines[-1], block.where, "exec"), names)
    assert torch.equal(base(**inputs).logits, plain)


def test_messages_of_the_troubleshooting_page_are_ours() -> None:
    """What its first column quotes is said somewhere in the code, but for numbers, names and signals."""
    said = re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")))
    rows = [
        line.split("|")[1] for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if line[:1] == "|"
    ]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip() for text in quoted for part in re.split(r"…|\bN\b|SIG[A-Z]+|\bnan\b", text) if part.strip()]
    assert len(quoted) > 10 and [part for part in parts if part not in said] == []


def test_every_setting_of_guard_is_told() -> None:
    """In docs/survive.md with what it stands for, and by `shardwise config --schema` in words of the field."""
    from shardwise.config.schema import Guard

    page = (ROOT / "docs/survive.md").read_text().partition("## Numbers gone wrong")[2].partition("\n## ")[0]
    for name in Guard.model_fields:
        assert re.search(rf"^ +{name}: \S+ +# ", page, re.M), name
    for choice in ("stop", "skip", "back"):
        assert f"| `{choice}` |" in page and f"{choice} = " in str(Guard.model_fields["nan"].description)
    said = " ".join(str(field.description) for field in Guard.model_fields.values())
    assert "NaN or infinite" in said and "standard deviations" in said and "bit for bit" in said
