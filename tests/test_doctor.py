"""`shardwise doctor`: this machine for real, and broken ones through small stand-ins."""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from shardwise.cli import doctor
from shardwise.cli.doctor import DoctorReport, Finding, diagnose, render
from shardwise.core.cpu_probe import CpuProbe

SECTIONS = ["system", "versions", "devices", "network", "model", "distributed"]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoctorReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        yield diagnose()


def text_of(report: DoctorReport) -> str:
    console = Console(width=200, file=None, record=True, quiet=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def only(findings: Iterator[Finding], name: str) -> Finding:
    found = [finding for finding in findings if finding.name == name]
    assert len(found) == 1, found
    return found[0]


def test_this_machine_is_looked_at_in_every_section(here: DoctorReport) -> None:
    assert list(here.sections) == SECTIONS
    assert all(here.sections.values())
    broken = [finding for findings in here.sections.values() for finding in findings if finding.name == "check"]
    assert not broken


def test_gloo_starts_here_and_says_so(here: DoctorReport) -> None:
    trial = only(here.sections["distributed"], "gloo trial")
    assert trial.level == "ok" and "reduced" in trial.text


def test_a_warning_always_says_what_to_do(here: DoctorReport) -> None:
    bad = [finding for findings in here.sections.values() for finding in findings if finding.level in ("warn", "fail")]
    assert all(finding.remedy for finding in bad)


def test_json_holds_what_the_screen_shows(here: DoctorReport) -> None:
    data = json.loads(here.to_json())
    shown = text_of(here)
    assert list(data["sections"]) == SECTIONS
    assert sum(data["counts"].values()) == sum(map(len, here.sections.values()))
    assert all(row["name"] in shown for rows in data["sections"].values() for row in rows)


def test_torch_is_imported_only_when_asked() -> None:
    code = "import sys, shardwise.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_a_check_that_breaks_becomes_a_finding_and_stops_nothing() -> None:
    def breaks() -> Iterator[Finding]:
        yield Finding("before", "ok", "seen")
        raise PermissionError("no [entry]\nsecond line")

    report = diagnose([("system", breaks), ("system", lambda: [Finding("after", "ok", "seen")])])
    before, broken, after = report.sections["system"]
    assert (before.name, after.name) == ("before", "after")
    assert broken.level == "warn" and broken.remedy
    assert broken.text == "breaks broke: PermissionError: no [entry]"
    assert "no [entry]" in text_of(report)  # brackets are text, not rich's markup


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("note", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_code_tells_failures(monkeypatch, capsys: pytest.CaptureFixture[str], level, code: int) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (("system", lambda: [Finding("it", level, "so", "do")]),))
    assert doctor.main(json=True) == code
    assert json.loads(capsys.readouterr().out)["counts"][level] == 1
    assert doctor.main(json=False) == code
    assert "→ do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.10.1", "fail"), ("2.11.0", "ok"), ("2.13.2+cu130", "ok"), ("2.14.0.dev20260101", "warn"), ("3.0", "warn"),
    ],
)  # fmt: skip
def test_torch_is_held_against_the_supported_range(monkeypatch, version: str, level: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "torch" else "1.0")
    torch = only(doctor.check_versions(), "torch")
    assert torch.level == level and version in torch.text
    assert (torch.remedy is None) == (level == "ok")


def test_missing_packages_fail_only_where_needed(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    levels = {finding.name: finding.level for finding in doctor.check_versions()}
    assert levels["transformers"] == "fail" and levels["triton"] == "note"


def test_a_torch_that_does_not_load_is_a_failure(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the import raise
    assert [finding.level for finding in doctor.check_versions() if "import" in finding.text] == ["fail"]


def test_a_tiny_shm_is_warned_of(monkeypatch) -> None:
    real = shutil.disk_usage
    tiny = Usage(64 * 2**20, 0, 64 * 2**20)  # what docker gives
    monkeypatch.setattr(shutil, "disk_usage", lambda path: tiny if str(path) == "/dev/shm" else real(path))
    shm = only(doctor.check_disk(), "/dev/shm")
    assert shm.level == "warn" and "0.1 GiB" in shm.text and "--shm-size" in str(shm.remedy)


def test_a_full_or_locked_disk_is_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 2**20))
    assert only(doctor.check_disk(), "disk (here)").level == "warn"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "not writable" in only(doctor.check_disk(), "disk (cache)").text


def test_little_memory_is_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "usable_memory", lambda: 2**30)
    monkeypatch.setattr(doctor, "free_memory", lambda: 2**29)
    memory = only(doctor.check_system(), "memory")
    assert memory.level == "warn" and "cgroup limit" in memory.text and "0.5 GiB free" in memory.text


def test_few_open_files_are_warned_of(monkeypatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    assert only(doctor.check_system(), "open files").level == "warn"
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    assert only(doctor.check_system(), "open files").text == "limit unlimited (can be raised to unlimited)"


class TestGlooAddress:
    @pytest.fixture(autouse=True)
    def _no_choice(self, monkeypatch) -> None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def gloo(self) -> Finding:
        return only(doctor.check_gloo_address(), "gloo")

    def test_an_unresolvable_hostname(self, monkeypatch) -> None:
        def fails(*args: object, **kwargs: object) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        finding = self.gloo()
        assert finding.level == "warn" and "does not resolve" in finding.text
        assert "GLOO_SOCKET_IFNAME" in str(finding.remedy)

    def test_a_name_server_that_does_not_answer(self, monkeypatch) -> None:
        real = doctor._within
        monkeypatch.setattr(doctor, "_within", lambda seconds, work: real(0.05, work))
        monkeypatch.setattr(doctor, "_resolve", lambda host: time.sleep(1))
        assert "no answer" in self.gloo().text

    def test_a_hostname_of_another_machine(self, monkeypatch) -> None:
        monkeypatch.setattr(doctor, "_resolve", lambda host: ["203.0.113.7"])  # reserved for documentation
        finding = self.gloo()
        assert finding.level == "warn" and "203.0.113.7" in finding.text

    def test_a_loopback_address_is_enough_for_one_machine(self, monkeypatch) -> None:
        monkeypatch.setattr(doctor, "_resolve", lambda host: ["203.0.113.7", "127.0.0.1"])
        assert self.gloo().level == "note"

    def test_an_outward_address_is_good(self, monkeypatch) -> None:
        monkeypatch.setattr(doctor, "_resolve", lambda host: ["203.0.113.7"])
        monkeypatch.setattr(doctor, "_bindable", lambda address: True)
        assert self.gloo().level == "ok"

    def test_a_chosen_interface_must_be_up(self, monkeypatch) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        assert self.gloo().level == "ok"
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nothere0")
        finding = self.gloo()
        assert finding.level == "fail" and "nothere0 is not up" in finding.text


def test_secrets_are_hidden_and_settings_shown() -> None:
    secrets = {
        "HF_TOKEN": "abc-secret-1",
        "HUGGING_FACE_HUB_TOKEN": "abc-secret-2",
        "NCCL_SECRET": "abc-secret-3",
        "HF_API_KEY": "abc-secret-4",
        "https_proxy": "http://me:abc-secret-5@proxy:3128",
        "HF_ENDPOINT": "https://hub/?t=hf_" + "a" * 34,
    }
    settings = {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_PKEY": "3",
        "HF_HOME": "/data/hf_cache_of_the_team",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "10.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    findings = {f.name: f.text for f in doctor.check_environment({**secrets, **settings, "HOME": "/root"})}
    assert findings == {**dict.fromkeys(secrets, "set (hidden)"), **settings}


def test_more_threads_than_cores_are_warned_of() -> None:
    assert only(doctor.check_environment({"OMP_NUM_THREADS": "4096"}), "threads").level == "warn"
    assert [finding.name for finding in doctor.check_environment({"OMP_NUM_THREADS": "1"})] == ["OMP_NUM_THREADS"]


def test_the_embedded_model_may_be_missing_empty_or_damaged(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "MODEL_PACKAGE", "no_such_model_package")
    missing = only(doctor.check_model(), "default model")
    assert missing.level == "warn" and "pip install" in str(missing.remedy)
    spec = importlib.machinery.ModuleSpec("package", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert "has no .gguf" in only(doctor.check_model(), "default model").text
    (tmp_path / "model.gguf").write_bytes(b"<html>")
    assert "damaged" in only(doctor.check_model(), "default model").text
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(8))
    assert only(doctor.check_model(), "default model").level == "ok"


@pytest.mark.parametrize(
    ("probe", "level", "words"),
    [
        (CpuProbe("bf16", None, True, 20.0, 10.0), "ok", "speed 2.00"),
        (CpuProbe("bf16", "AVX2", True, 5.0, 10.0), "note", "ONEDNN_MAX_CPU_ISA=AVX2"),
        (CpuProbe("bf16", None, False, 0.0, 0.0), "warn", "every instruction-set cap"),
    ],
)
def test_the_cpu_is_judged_by_its_probe(probe: CpuProbe, level: str, words: str) -> None:
    findings = list(doctor._cpu_findings("Some CPU", frozenset({"avx2"}), probe))
    assert "AVX2 yes, AVX512 no" in findings[0].text
    bf16 = only(iter(findings), "bf16")
    assert bf16.level == level and words in bf16.text
    assert any(finding.name == "precision" for finding in findings) == (probe.works and probe.gflops < 10)


@pytest.mark.parametrize(
    ("capability", "level", "words"),
    [((7, 5), "warn", "bf16 no, fp8 no"), ((8, 0), "ok", "bf16 yes, fp8 no"), ((8, 9), "ok", "bf16 yes, fp8 yes")],
)
def test_gpus_are_judged_by_capability(capability: tuple[int, int], level: str, words: str) -> None:
    properties = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30, major=capability[0], minor=capability[1])
    cuda = SimpleNamespace(get_device_properties=lambda index: properties, mem_get_info=lambda index: (2**30, 2**36))
    finding = doctor._gpu_finding(cuda, 3)
    assert finding.level == level and words in finding.text and finding.name == "GPU 3"
    assert "80.0 GiB (1.0 GiB free)" in finding.text


def test_a_gpu_that_cannot_be_used_is_a_failure() -> None:
    def fails(index: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    finding = doctor._gpu_finding(SimpleNamespace(get_device_properties=fails), 0)
    assert finding.level == "fail" and finding.text == "cannot be used: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("program", "timeout", "words"),
    [("raise OSError('no route')", 60.0, "no route"), ("import time; time.sleep(60)", 0.3, "not ready after")],
)
def test_a_gloo_that_fails_or_hangs_is_a_failure(monkeypatch, program: str, timeout: float, words: str) -> None:
    monkeypatch.setattr(doctor, "GLOO_TRIAL", program)
    trouble = doctor._gloo_trouble(timeout)
    assert trouble is not None and words in trouble
    monkeypatch.setattr(doctor, "_gloo_trouble", lambda: trouble)
    assert only(doctor.check_distributed(), "gloo trial").level == "fail"
