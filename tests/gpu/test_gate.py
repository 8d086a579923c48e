"""The gate on a GPU: what will not fit is refused, its first remedy applied trains, and predictions come true.

For a card of 140 GB; one run at a time, so several of these tests can be started side by side.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.tiny import saved_model, tiny_run, tokenizer_folder

from shardwise.core.errors import RunFailed, UserError
from shardwise.launch.trainer import Trainer
from shardwise.observe import prediction as kept

CARD = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(CARD < 130e9, reason="no CUDA device of 140 GB")]

SMALL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 16, "n_head": 16, "n_positions": 8192, "vocab_size": 32768,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
        "num_attention_heads": 16, "max_position_embeddings": 2048, "vocab_size": 32768}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024, "moe_intermediate_size": 768,
           "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
           "num_experts": 16, "num_experts_per_tok": 4, "max_position_embeddings": 65536}  # fmt: skip

# Model, sequence, micro-batch and what is unusual.
TOO_LARGE: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "full": (SMALL, 8192, 32, {}),
    "one sequence": (SMALL, 262144, 1, {}),
    "gpt2": (GPT2, 4096, 48, {}),
    "lora": (SMALL, 16384, 32, {"method": "lora"}),
    "qlora": (SMALL, 32768, 16, {"method": "qlora"}),
    "fp32": (SMALL, 4096, 32, {"precision": "fp32"}),
    "plain loss": (SMALL | {"vocab_size": 131072}, 4096, 32, {"loss": "plain"}),
    "masked": (BERT, 512, 1024, {"objective": "masked", "data__packing": False, "data__over_length": "truncate"}),
    "experts": (EXPERTS, 8192, 24, {}),
    "fp8": (SMALL, 8192, 48, {"precision": "fp8"}),
}


@pytest.fixture(scope="module", autouse=True)
def _memory_in_pieces() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")


@pytest.fixture
def alone() -> Iterator[None]:
    with FileLock("/tmp/shardwise-gpu-test.lock"):
        yield
        gc.collect()
        torch.cuda.empty_cache()


def a_run(tmp: Path, model: Any, length: int, micro: int, **changes: Any) -> dict[str, Any]:
    words = ("shards", "of", "a", "model", "gather", "before", "each", "block", "and", "leave", "after", "it")
    tokens = max(2 * length * micro, 200_000)
    with (tmp / "texts.jsonl").open("w") as out:
        for number in range(tokens // 1000 + 1):
            text = " ".join(words[(number * 7 + i * i) % len(words)] for i in range(500))
            out.write(json.dumps({"text": text}) + "\n")
    usual = {
        "data__train": str(tmp / "texts.jsonl"), "data__sequence_length": length, "data__eval": 0.0,
        "precision": "bf16",
        "device": "cuda", "backend": "gloo", "ranks": 1, "train__steps": 2, "train__batch_size": micro,
        "train__micro_batch_size": micro, "parallel__zero": 2, "export__check": False,
    }  # fmt: skip
    return tiny_run(tmp, model, **(usual | changes))


def described(tmp: Path, config: dict[str, Any], saved: bool) -> Any:
    if saved:
        return saved_model(tmp / "model", config)
    return {"config": config, "tokenizer": tokenizer_folder(tmp / "tokenizer")}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_does_not_fit_is_refused_and_its_first_remedy_runs(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config, length, micro, changes = TOO_LARGE[name]
    model = described(tmp_path, config, "method" in changes)
    run = a_run(tmp_path, model, length, micro, **changes)
    with pytest.raises(UserError, match="will not fit") as refused:
        Trainer(run).prepare(print)
    print(f"\n{name}: {refused.value}")
    first = refused.value.remedy.splitlines()[0].partition(": ")[0]
    made = Trainer(run, *first.split())
    made.prepare(print)
    request.getfixturevalue("alone")
    result = made.fit(print)
    assert result.step == 2
    told = json.loads((tmp_path / "out" / kept.FILE).read_text())
    peak = max(row["memory_bytes"] for row in result.metrics if row["kind"] == "train")
    print(f"{name}: with {first}: foreseen {told['foreseen_bytes'] / 2**30:.2f} GiB, was {peak / 2**30:.2f} GiB, "
          f"{told['foreseen_bytes'] / peak - 1:+.1%}")  # fmt: skip
    assert told["fits"] and told["foreseen_bytes"] == pytest.approx(peak, rel=0.06)


def test_forced_it_runs_out_and_says_of_what(tmp_path: Path, alone: None) -> None:
    run = a_run(tmp_path, described(tmp_path, SMALL, False), 8192, 64)
    said: list[str] = []
    with pytest.raises(RunFailed) as ended:
        Trainer(run, force=True).fit(said.append)
    print(f"\n{ended.value}")
    assert any("--force" in line for line in said)
    assert "foreseen" in str(ended.value) and "saves" in str(ended.value)


def test_left_open_it_is_answered_and_fits(tmp_path: Path, alone: None) -> None:
    run = a_run(tmp_path, described(tmp_path, SMALL, False), 8192, 32)
    run |= {"parallel": "auto", "recompute": "auto"}
    run["train"]["micro_batch_size"] = "auto"
    made = Trainer(run)
    job = made.prepare(print)
    print(job.run.parallel, job.run.recompute, job.run.train.micro_batch_size, job.reasons)
    assert job.run.train.micro_batch_size != "auto" and made.fit(print).step == 2
