"""The figures of the ZeRO paper and of DeepSpeed's documentation come out of the formulas."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.deepspeed.runtime.zero import stage3, stage_1_and_2
from shardwise.foresight.plan import published
from shardwise.foresight.plan.published import GB, activations, model_to_params, zero_model_states

GIB = 2**30
# Table 1 of the paper: GB per device at stages 1, 2 and 3, by the number of devices; it cuts or rounds the last digit.
TABLE = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
        256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip


@pytest.mark.parametrize("parameters", TABLE)
def test_table_1_of_the_zero_paper(parameters: float) -> None:
    for devices, row in TABLE[parameters].items():
        for stage, expected in enumerate(row, start=1):
            held = zero_model_states(stage, parameters, devices) / GB
            assert held == pytest.approx(expected, rel=0.004, abs=0.005), (devices, stage)


def test_figure_1_of_the_zero_paper() -> None:
    """7.5B parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB."""
    held = [round(zero_model_states(stage, 7.5e9, 64) / GB, 1) for stage in range(4)]
    assert held == [120, 31.4, 16.6, 1.9]


def test_gpt2_of_the_zero_paper() -> None:
    """1.5B parameters: 24 GB of states; 60 GB of activations at 32 x 1K, about 8 with recomputation."""
    assert zero_model_states(0, 1.5e9, 1) == 24 * GB
    shape = {"hidden": 1600, "layers": 48, "sequence": 1024, "batch": 32}
    assert activations(**shape) / GB == pytest.approx(60, rel=0.01)
    assert activations(**shape, recompute=True) / GB == pytest.approx(8, rel=0.1)
    assert zero_model_states(1, 1e9, 2, optimizer=8) == 8e9, "another optimizer"


@pytest.mark.parametrize(("offload", "host", "device"), [(True, 127.45, 5.31), (False, 127.45, 15.93)])
def test_deepspeed_documented_zero2(offload: bool, host: float, device: float) -> None:
    """2,851M parameters, one node of 8."""
    needs = published.estimate_zero2_model_states_mem_needs(2851e6, 8, 1, offload)
    assert [round(one / GIB, 2) for one in needs] == [host, device]


ZERO3 = [
    (True, True, True, 71.69, 0.12),
    (True, True, False, 127.45, 0.12),
    (True, False, True, 63.72, 0.78),
    (True, False, False, 127.45, 0.78),
    (False, False, True, 1.43, 6.09),
    (False, False, False, 127.45, 6.09),
]


@pytest.mark.parametrize(("offload", "parameters", "init", "host", "device"), ZERO3)
def test_deepspeed_documented_zero3(offload: bool, parameters: bool, init: bool, host: float, device: float) -> None:
    """2,851M parameters, 32M in the largest layer, one node of 8."""
    needs = published.estimate_zero3_model_states_mem_needs(2851e6, 32e6, 8, 1, offload, parameters, init)
    assert [round(one / GIB, 2) for one in needs[:2]] == [host, device]
    assert needs[2] == 4 * 32e6


def test_deepspeed_documented_t5_large() -> None:
    """737.67M parameters, 32.90M in the largest layer, 4 GPUs: 3291, 125 and 477 MB."""
    estimate = published.estimate_zero3_model_states_mem_needs
    devices = [
        estimate(737.67e6, 32.90e6, 4, 1, *case)[1] >> 20 for case in ((False, False), (True, True), (True, False))
    ]
    assert devices == [3291, 125, 477]


def test_several_nodes_and_the_buffer_factor() -> None:
    zero2, zero3 = published.estimate_zero2_model_states_mem_needs, published.estimate_zero3_model_states_mem_needs
    assert zero2(1000, 2, 4, True, additional_buffer_factor=1.0) == (16000, 2000)
    assert zero2(1000, 2, 4, False, additional_buffer_factor=2.0) == (16000, 4000 + 2000)
    assert zero3(1000, 10, 2, 4, True, True, True, additional_buffer_factor=1.0) == (18 * 250, 40, 40)
    assert zero3(1000, 10, 2, 4, True, True, False, additional_buffer_factor=1.0)[0] == 8000


def test_printers_in_deepspeed_s_layout(capsys: pytest.CaptureFixture[str]) -> None:
    stage3.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, num_gpus_per_node=8, num_nodes=1)
    shown = capsys.readouterr().out
    assert "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1" in shown
    assert "    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1" in shown
    assert "1 node, 8 GPUs per node" in shown and "2851M total params, 32M largest layer params" in shown
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(2851e6, num_gpus_per_node=8, num_nodes=1)
    assert "  127.45GB |  15.93GB | offload_optimizer=none" in capsys.readouterr().out
    tied = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    tied[1].weight = tied[0].weight
    assert model_to_params(tied) == (120, 110)
    stage3.estimate_zero3_model_states_mem_needs_all_live(tied)
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(tied)
    assert capsys.readouterr().out.count("0M total params") == 2
