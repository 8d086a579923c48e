"""Bugs put into the code of exports on purpose: each must be caught by the check that every export goes through."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import scenarios
from support.gguf_models import family_folder
from support.ranks import run_ranks
from support.tiny import TIED, saved_model, tiny_run

from shardwise.checkpoint import hf
from shardwise.checkpoint.hf import ExportOptions, find_checkpoint
from shardwise.export import command, gguf_file
from shardwise.export.check import Mismatch
from shardwise.export.command import export_folder, export_gguf
from shardwise.export.families import FAMILIES
from shardwise.nn.models.names import TensorNames, TensorPart

Plant = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder that has a tied head written out, and a tensor that transformers builds nothing for."""
    tmp = tmp_path_factory.mktemp("planted")
    folder = tmp / "source"
    saved_model(folder, TIED)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    extra = {"lm_head.weight": head, "mtp.weight": torch.randn(8, 8)}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    run_ranks(scenarios.train, 1, tiny_run(tmp, str(folder), train__steps=2, train__micro_batch_size=6))
    return tmp / "out"


def lost_tensor(patch: pytest.MonkeyPatch, source: Path) -> None:
    patch.setattr(hf, "_untouched", lambda *_: [])


def lost_parameter(patch: pytest.MonkeyPatch, source: Path) -> None:
    entries = hf._entries
    patch.setattr(hf, "_entries", lambda *args: [e for e in entries(*args) if "layers.1.mlp.up_proj" not in e.name])


def changed_copy(patch: pytest.MonkeyPatch, source: Path) -> None:
    read = hf.read_stored
    patch.setattr(hf, "read_stored", lambda name, one: read(name, one) * 2)


def stale_head(patch: pytest.MonkeyPatch, source: Path) -> None:
    """The head as it was before training, under the name that it has in the source."""
    back = hf._SourceReader.__call__
    before = load_file(source / "model.safetensors")["lm_head.weight"]

    def call(self: Any, part: TensorPart, name: str) -> torch.Tensor:
        return before if name == "lm_head.weight" else back(self, part, name)

    patch.setattr(hf._SourceReader, "__call__", call)


def swapped_names(patch: pytest.MonkeyPatch, source: Path) -> None:
    back = hf._SourceReader.__call__
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def call(self: Any, part: TensorPart, name: str) -> torch.Tensor:
        for one, two in other.items():
            if f"layers.2.mlp.{one}" in name:
                found = next(p for p in self._linked.parts if p.writes == (name.replace(one, two),))
                return back(self, found, found.writes[0])
        return back(self, part, name)

    patch.setattr(hf._SourceReader, "__call__", call)


def leaked(key: str, value: Any) -> Plant:
    def plant(patch: pytest.MonkeyPatch, source: Path) -> None:
        stamp = hf._stamp_dtype

        def leak(file: Path, *args: Any) -> None:
            stamp(file, *args)
            file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

        patch.setattr(hf, "_stamp_dtype", leak)

    return plant


FOLDERS: dict[str, tuple[Plant, str]] = {
    "a tensor of the source lost": (lost_tensor, r"lacks 1 tensor \(mtp\.weight\)"),
    "a parameter lost": (lost_parameter, r"lacks 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
    "a copy that is none": (changed_copy, r"mtp\.weight, which training did not touch"),
    "a stale tied head": (stale_head, "not the trained one"),
    "names swapped": (swapped_names, r"layers\.2\.mlp\.(gate|up)_proj\.weight differs"),
    "use_cache leaked": (leaked("use_cache", False), "its config says use_cache: False"),
    "a router's loss leaked": (leaked("output_router_logits", True), "its config says output_router_logits: True"),
}


@pytest.mark.parametrize("bug", FOLDERS)
def test_a_folder(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    plant, words = FOLDERS[bug]
    plant(monkeypatch, output.parent / "source")
    with pytest.raises(Mismatch, match=words):
        export_folder(find_checkpoint(output), tmp_path / "model", ExportOptions(verified=True))
    assert [path.name for path in tmp_path.iterdir()] == ["model.rejected"]


def test_without_a_bug(output: Path, tmp_path: Path) -> None:
    assert export_folder(find_checkpoint(output), tmp_path / "model", ExportOptions(verified=True)).checked


def no_biases(patch: pytest.MonkeyPatch) -> None:
    plan = command.plan_gguf

    def planned(*args: Any, **more: Any) -> gguf_file.GgufPlan:
        made = plan(*args, **more)
        return replace(made, tensors=[one for one in made.tensors if not one.name.endswith(".bias")])

    patch.setattr(command, "plan_gguf", planned)


def unpermuted(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], layouts={}))


def permuted_keys_as_queries(patch: pytest.MonkeyPatch) -> None:
    """Right for models whose keys have as many heads as queries."""
    layouts = dict(FAMILIES["llama"].layouts)
    layouts["blk.*.attn_k.*"] = layouts["blk.*.attn_q.*"]
    patch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], layouts=layouts))


def no_factors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gguf_file, "rope_tensors", lambda config: iter(()))


GGUF: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "biases dropped": (no_biases, "llama-biased", r"self_attn\.q_proj\.bias differs"),
    "queries and keys not permuted": (unpermuted, "llama", r"self_attn\.[qk]_proj\.weight differs"),
    "keys permuted like queries": (permuted_keys_as_queries, "llama", r"self_attn\.k_proj\.weight differs"),
    "rotary scaling dropped": (no_factors, "llama3-rope", "its rotary frequencies"),
}


@pytest.mark.parametrize("bug", GGUF)
def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    plant, name, words = GGUF[bug]
    folder = family_folder(tmp_path, name)
    plant(monkeypatch)
    with pytest.raises(Mismatch, match=words):
        export_gguf(str(folder), tmp_path / "model.gguf", "q8_0")
    assert (tmp_path / "model.gguf.rejected").is_file() and not (tmp_path / "model.gguf").exists()


def test_lost_names_are_known() -> None:
    """What a link cannot give back is told by the link itself."""
    linked = TensorNames(None, {"a": "b"}, ("c",), {}, [TensorPart(("b",), ("a",))])
    assert linked.lost == {"c"}
