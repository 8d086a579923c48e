"""Checkpoints under DeepSpeed's names: tags, `latest`, client state; other stages and rank counts; zero_to_fp32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import deepspeed_scenarios as scenarios
from support.ranks import run_ranks

from shardwise.core.errors import UserError
from shardwise.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(scenarios.save_all, 2, 3, str(folder))[0]


Saved = tuple[Path, dict[str, Any]]


def load(saved: Saved, stage: int, ranks: int, **how: Any) -> dict[str, Any]:
    return run_ranks(scenarios.load_and_go, ranks, stage, str(saved[0]), how)[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(
    ("stage", "ranks"), [(3, 2), *(pytest.param(*c, marks=pytest.mark.slow) for c in [(1, 2), (2, 1)])]
)
def test_goes_on_exactly(saved: Saved, stage: int, ranks: int) -> None:
    found = load(saved, stage, ranks)
    assert found["path"] == str(saved[0] / "global_step2")
    assert found["client"] == {"step": 4, "any": {1, 2}}
    assert found["steps"] == 2 and same(found["state"], saved[1]["state"])
    bound = 0.0 if (stage, ranks) == (3, 2) else 1e-5
    assert max(abs(a - b) for a, b in zip(found["rest"], saved[1]["rest"], strict=True)) <= bound


def test_options(saved: Saved) -> None:
    module_only = load(saved, 3, 2, load_module_only=True)
    assert module_only["steps"] == 0 and module_only["lr"] == 0.0 and same(module_only["state"], saved[1]["state"])
    no_states = load(saved, 3, 2, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert no_states["steps"] == 2 and no_states["lr"] == 0.0
    assert no_states["rest"] != saved[1]["rest"]
    tagged = load(saved, 3, 2, tag="light")
    assert tagged["steps"] == 5 and not same(tagged["state"], saved[1]["state"])
    missing = load(saved, 3, 2, tag="nothing")
    assert (missing["path"], missing["client"]) == (None, None)


def test_damage_is_refused(saved: Saved, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved[0], tmp_path / "copy")
    file = next((tmp_path / "copy/global_step2").rglob("__0_*"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(bytes(raw))
    with pytest.raises(AssertionError, match="its hash does not match"):
        run_ranks(scenarios.load_and_go, 2, 3, str(tmp_path / "copy"), {})


def test_zero_to_fp32(saved: Saved, tmp_path: Path) -> None:
    """As a function, into a model, lazily, and as a program in small safetensors files."""
    folder, state = saved[0], saved[1]["state"]
    model = scenarios.Small()
    single = {name: value for name, value in state.items() if name != "head.weight"}  # tied: stored once
    assert same(get_fp32_state_dict_from_zero_checkpoint(folder), single)
    assert same(dict(load_state_dict_from_zero_checkpoint(model, folder).state_dict()), state)
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert torch.equal(lazy["embed.weight"].contiguous(), state["embed.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert single.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "bin")
    assert same(torch.load(tmp_path / "bin/pytorch_model.bin"), single)
    program = [sys.executable, "-m", "shardwise.deepspeed.zero_to_fp32", str(folder), str(tmp_path / "safe"),
               "--max_shard_size", "1000", "--safe_serialization"]  # fmt: skip
    subprocess.run(program, check=True, capture_output=True)
    from safetensors.torch import load_file

    files = sorted((tmp_path / "safe").glob("*.safetensors"))
    assert len(files) > 1 and (tmp_path / "safe/model.safetensors.index.json").is_file()
    assert same({k: v for file in files for k, v in load_file(file).items()}, single)
    with pytest.raises(UserError, match="latest"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_whole_states(saved: Saved) -> None:
    state = saved[1]["state"]
    assert saved[1]["prefixed"] == {f"module.{name}" for name in state}
    written = torch.load(saved[0] / "model.bin")
    assert same(written, state) and written["head.weight"].data_ptr() == written["embed.weight"].data_ptr()
    other = {name: value + 1 for name, value in state.items()}
    assert same(run_ranks(scenarios.load_state, 2, 3, other)[1], other)
