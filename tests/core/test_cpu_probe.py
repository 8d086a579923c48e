"""The CPU probe: real trials here, and machines that die, hang or lie, played by a small program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core import cpu_probe as cpu
from shardwise.core.cpu_probe import CAP, CpuProbe, cpu_env, free_memory, probe_cpu, usable_cores, usable_memory
from shardwise.core.errors import UserError

SPEEDS = '{"fp32": 10.0, "bf16": 20.0}'
UNLIMITED = str(2**63 - 4096)  # what cgroup v1 says when there is no limit


@pytest.fixture(autouse=True)
def _no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CAP, "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts a program in the trial's place; returns a function that says which caps it was started with."""

    def start(body: str) -> Path:
        script, tries = tmp_path / "trial.py", tmp_path / "tries"
        head = (
            f"import os, signal, sys\ncap = os.environ.get({CAP!r})\nopen({str(tries)!r}, 'a').write(f'{{cap}}\\n')\n"
        )
        script.write_text(head + body)
        monkeypatch.setattr(cpu, "__file__", str(script))
        return tries

    return start


def dies_unless(cap: str | None, how: str = "os.kill(os.getpid(), signal.SIGILL)") -> str:
    return f"if cap != {cap!r}: {how}\nprint({SPEEDS!r})\n"


def test_bf16_really_runs_under_what_the_probe_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    probe = probe_cpu("bf16")
    assert probe.works and probe.gflops > 0 and probe.fp32_gflops > 0
    env = cpu_env("bf16")
    assert env == ({} if probe.isa is None else {CAP: probe.isa})
    code = "import torch; x = torch.randn(64, 64).bfloat16(); torch.nn.functional.linear(x, x)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}).returncode == 0
    assert [file.suffix for file in (tmp_path / "probes").iterdir()] == [".json"]  # and no temporary file is left


def test_the_answer_is_remembered(tmp_path: Path, play) -> None:
    tries = play(dies_unless(None))
    first = probe_cpu("bf16", tmp_path / "cache")
    assert first == CpuProbe("bf16", None, True, 20.0, 10.0)
    assert probe_cpu("bf16", tmp_path / "cache") == first
    assert tries.read_text() == "None\n"


def test_caps_are_tried_from_high_to_low_until_one_survives(tmp_path: Path, play) -> None:
    tries = play(dies_unless("AVX512_CORE"))
    assert probe_cpu("bf16", tmp_path / "cache").isa == "AVX512_CORE"
    assert tries.read_text().split() == ["None", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE"]


def test_other_architectures_are_tried_without_caps_only(tmp_path: Path, play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    tries = play(dies_unless("never"))
    assert not probe_cpu("bf16", tmp_path / "cache").works
    assert tries.read_text() == "None\n"


def test_the_users_own_cap_comes_first(tmp_path: Path, play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAP, "AVX2")
    tries = play(dies_unless("AVX2"))
    assert probe_cpu("bf16", tmp_path / "cache").isa == "AVX2"
    assert tries.read_text() == "AVX2\n"


def test_a_bad_cap_of_the_users_is_overruled_even_by_none(
    tmp_path: Path, play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(CAP, "SSE41")
    play(dies_unless("DEFAULT"))
    assert cpu_env("bf16") == {CAP: "DEFAULT"}  # {} would let workers inherit SSE41
    monkeypatch.delenv(CAP)
    play(dies_unless(None))
    assert cpu_env("bf16") == {}  # what was found under the user's cap is not taken for the general answer


def test_a_cpu_that_cannot_is_told_before_workers_start(tmp_path: Path, play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    tries = play(dies_unless("never"))
    assert probe_cpu("bf16") == CpuProbe("bf16", None, False, 0.0, 0.0)
    with pytest.raises(UserError, match=r"precision = 'bf16'.*\n.*fp32"):
        cpu_env("bf16")
    assert len(tries.read_text().split()) == 5  # the second question was answered from the cache


@pytest.mark.parametrize(
    "how", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(1)", "print('no json'); sys.exit(0)"]
)
def test_a_failure_that_may_pass_is_not_remembered(tmp_path: Path, play, how: str) -> None:
    play(dies_unless("AVX512_CORE_FP16", how))
    assert probe_cpu("bf16", tmp_path / "cache").isa == "AVX512_CORE_FP16"
    assert not (tmp_path / "cache").exists()


def test_a_trial_that_hangs_is_ended(play) -> None:
    play("import time; time.sleep(60)")
    assert cpu._try("bf16", None, timeout=0.5).code is None


def test_a_trial_reports_the_signal_it_died_of(play) -> None:
    play(dies_unless("never"))
    assert cpu._try("bf16", None).code == -signal.SIGILL


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: "{",
        lambda entry: "[]",
        lambda entry: json.dumps({**entry, "probe": {"dtype": "bf16"}}),
        lambda entry: json.dumps({**entry, "probe": {**entry["probe"], "gflops": "fast"}}),
        lambda entry: json.dumps({**entry, "key": {**entry["key"], "torch": "1.0"}}),
    ],
)
def test_a_corrupt_cache_file_is_ignored_and_rewritten(tmp_path: Path, play, spoil) -> None:
    tries = play(dies_unless(None))
    probe = probe_cpu("bf16", tmp_path / "cache")
    [file] = (tmp_path / "cache").iterdir()
    good = file.read_text()
    file.write_text(spoil(json.loads(good)))
    assert probe_cpu("bf16", tmp_path / "cache") == probe
    assert len(tries.read_text().split()) == 2
    assert file.read_text() == good


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, play) -> None:
    play(dies_unless(None))
    (tmp_path / "file").touch()
    assert probe_cpu("bf16", tmp_path / "file" / "cache").works


def test_each_dtype_has_an_answer_of_its_own(tmp_path: Path, play) -> None:
    play('print(\'{"fp32": 10.0, "%s": 5.0}\' % sys.argv[1])')
    assert probe_cpu("fp16", tmp_path / "cache").gflops == 5.0
    assert probe_cpu("fp32", tmp_path / "cache").dtype == "fp32"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_wrong_numbers_count_as_failure() -> None:
    import torch

    right = [torch.ones(4), torch.arange(4.0)]
    assert cpu._close_enough([tensor * 1.02 for tensor in right], right)
    assert not cpu._close_enough([right[0], right[1] * 1.5], right)
    assert not cpu._close_enough([right[0], right[1] * float("nan")], right)


def grow(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "4:memory:/job/step\n1:cpu,cpuacct:/job/step\n0::/\n"
V2 = "0::/slice/job\n"
GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": V2, f"{GROUPS}/slice/job/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": V2, f"{GROUPS}/slice/job/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": V2, f"{GROUPS}/slice/cpu.max": "200000 100000\n"}, 2),  # a parent's quota binds too
        ({"proc/self/cgroup": V2, f"{GROUPS}/cpu.max": "50000 100000\n"}, 1),  # never 0; a container's view
        (
            {
                "proc/self/cgroup": V1,
                f"{GROUPS}/cpu,cpuacct/job/step/cpu.cfs_quota_us": "450000\n",
                f"{GROUPS}/cpu,cpuacct/job/step/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{GROUPS}/cpu/job/step/cpu.cfs_quota_us": "-1\n",
                f"{GROUPS}/cpu/job/step/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_cores_are_bounded_by_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores(grow(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used"),
    [
        (V2, f"{GROUPS}/slice/job", "memory.max", "memory.current"),
        (V2, f"{GROUPS}/unified/slice", "memory.max", "memory.current"),
        (V1, f"{GROUPS}/memory/job/step", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_is_bounded_by_the_cgroup(tmp_path: Path, cgroup: str, folder: str, limit: str, used: str) -> None:
    mib = 2**20
    files = {f"{folder}/{limit}": str(64 * mib), f"{folder}/{used}": str(40 * mib)}
    root = grow(tmp_path, {"proc/self/cgroup": cgroup, **files, f"{folder}/memory.stat": f"inactive_file {8 * mib}\n"})
    assert usable_memory(root) == 64 * mib
    assert free_memory(root) == 32 * mib


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    import psutil

    total = psutil.virtual_memory().total
    group = {"proc/self/cgroup": V1, f"{GROUPS}/memory/memory.limit_in_bytes": UNLIMITED}
    assert usable_memory(grow(tmp_path, group)) == total
    assert usable_memory(tmp_path / "nowhere") == total


def test_this_machine_has_something_to_use() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert 0 < free_memory() <= usable_memory()
