"""GGUF files of this project beside those of llama.cpp's converter: same tensors, same settings? CPU time and memory.

    git clone https://github.com/ggml-org/llama.cpp
    PYTHONPATH=src:tests python benchmarks/decisions/gguf_files.py llama.cpp/convert_hf_to_gguf.py OUT.json

SmolLM2-135M-Instruct and tiny models of every family with random weights, each written in fp32 by both. Tiny models
have a tokenizer that was trained on the spot, as a model from scratch does; llama.cpp's converter knows tokenizers by a
hash and refuses it, so tensors are compared with that one answer supplied ("gpt-2").
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMOL = "smollm2-135m-instruct"
IGNORED = ("general.", "GGUF.", "tokenizer.chat_template")  # names, authors, dates


def write_ours(model: str, target: str) -> None:
    """As `shardwise export --gguf f32` without the check that follows it."""
    from shardwise.config.schema import Model
    from shardwise.export.gguf_file import plan_gguf, write_gguf
    from shardwise.nn.models.source import find_model

    write_gguf(plan_gguf(find_model(Model(name=model)), "f32", unreadable=True), Path(target), "model")


def timed(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """CPU seconds and peak memory of a child process, and how it ended."""
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code,
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_MiB": usage.ru_maxrss // 1024,
        "error": "" if code == 0 else text.strip().splitlines()[-1][:200],
    }


def here(work: Callable[[], None]) -> dict[str, Any]:
    """Does it in this process, which saves the imports; how it ended."""
    try:
        work()
    except SystemExit as error:
        if error.code:
            return {"error": f"exit code {error.code}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
    return {"error": ""}


def convert(converter: str, folder: str, target: str) -> None:
    """llama.cpp's script as its command runs it."""
    sys.path.insert(0, str(Path(converter).parent))
    sys.argv = [converter, folder, "--outtype", "f32", "--outfile", target]
    runpy.run_path(converter, run_name="__main__")


def contents(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and tensors of a file."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    settings = {name: field.contents() for name, field in reader.fields.items() if not name.startswith(IGNORED)}
    return settings, {t.name: (tuple(t.shape), t.tensor_type.name, t.data) for t in reader.tensors}


def compare(ours: Path, theirs: Path) -> dict[str, Any]:
    """What differs between two files."""
    import numpy as np

    (our_settings, our_tensors), (their_settings, their_tensors) = contents(ours), contents(theirs)
    both = set(our_tensors) & set(their_tensors)
    unequal = [
        name
        for name in sorted(both)
        if our_tensors[name][:2] != their_tensors[name][:2]
        or not np.array_equal(our_tensors[name][2], their_tensors[name][2])
    ]
    keys = set(our_settings) & set(their_settings)
    return {
        "tensors": len(both),
        "unequal": unequal,
        "tensors only ours": sorted(set(our_tensors) - both),
        "tensors only theirs": sorted(set(their_tensors) - both),
        "settings": len(keys),
        "settings that differ": {
            k: [str(our_settings[k])[:60], str(their_settings[k])[:60]]
            for k in sorted(keys)
            if not same(our_settings[k], their_settings[k])
        },
        "settings only ours": sorted(set(our_settings) - keys),
        "settings only theirs": {k: str(their_settings[k])[:40] for k in sorted(set(their_settings) - keys)},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return bool(a == b)


def name_tokenizer(converter: str, pre: str) -> None:
    """Has llama.cpp's converter take every tokenizer for one that it knows."""
    sys.path.insert(0, str(Path(converter).parent))
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre


def main() -> None:
    """Prints one line per model and writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("converter")
    parser.add_argument("output")
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    from support.gguf_models import MODELS, family_folder

    from shardwise.config.schema import Model
    from shardwise.nn.models.source import find_model

    env = os.environ | {"OMP_NUM_THREADS": "1"}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        own = str(family_folder(root, "llama"))
        print(
            "a tokenizer of one's own:",
            here(lambda: convert(options.converter, own, str(root / "own.gguf"))),
            flush=True,
        )
        name_tokenizer(options.converter, "gpt-2")
        for name in options.only or [SMOL, *MODELS]:
            real = name == SMOL
            folder = Path(str(find_model(Model(name=SMOL)).weights)) if real else family_folder(root, name)
            ours, theirs = root / f"{name}-ours.gguf", root / f"{name}-theirs.gguf"
            if real:
                mine = [sys.executable, __file__, "--write", str(folder), str(ours)]
                other = [sys.executable, options.converter, str(folder), "--outtype", "f32", "--outfile", str(theirs)]
                row = {"ours": timed(mine, env), "theirs": timed(other, env)}
            else:
                row = {
                    "ours": here(lambda folder=folder, ours=ours: write_ours(str(folder), str(ours))),
                    "theirs": here(
                        lambda folder=folder, theirs=theirs: convert(options.converter, str(folder), str(theirs))
                    ),
                }
            if not row["ours"]["error"] and not row["theirs"]["error"]:
                row |= compare(ours, theirs)
            results[name] = row
            print(name, json.dumps(row), flush=True)
            for file in (ours, theirs):
                file.unlink(missing_ok=True)
    Path(options.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write_ours(*sys.argv[2:4])
    else:
        main()
