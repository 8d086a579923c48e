"""What the package's own source must not do, and the few places that may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/shardwise"
# A process's own child, by a file in a folder that no one else can enter; and the index of a checkpoint, by a reader
# that knows only what an index is made of.
PICKLES = {"train/trial/check.py", "core/safe_pickle.py"}
SAFE_LOADERS = {"_Loader", "BoundedLoader"}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield file.relative_to(SOURCE).as_posix(), ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), None)


def faults(file: str, name: str, call: ast.Call) -> str | None:
    """What is wrong with a call, if anything."""
    last = name.rpartition(".")[2]
    if name in ("eval", "exec", "os.system", "os.popen", "pickle.load", "marshal.loads", "shelve.open", "joblib.load"):
        return name
    if name in ("pickle.loads", "pickle.Unpickler") and file not in PICKLES:
        return "a pickle is read"
    if name == "torch.load" and keyword(call, "weights_only") != "True":
        return "torch.load without weights_only=True"
    if last == "load" and name.startswith("np.") and keyword(call, "allow_pickle") not in (None, "False"):
        return "an array that may be a pickle"
    if name == "yaml.load" and (len(call.args) < 2 or ast.unparse(call.args[1]) not in SAFE_LOADERS):
        return "YAML without a safe loader"
    if name in ("yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp") or last in ("extractall", "unpack_archive"):
        return name
    if keyword(call, "shell") == "True":
        return "a shell"
    if last == "from_pretrained" and name.startswith(("Auto", "auto_class", "kind")):
        spread = any(one.arg is None for one in call.keywords)  # **where, which has it
        if keyword(call, "trust_remote_code") is None and not spread:
            return "from_pretrained would ask whether to run a model's own code"
        if keyword(call, "trust_remote_code") == "True":
            return "a model's own code is run unasked"
    return None


def test_no_pickle_shell_or_foreign_code() -> None:
    found = [f"{file}:{call.lineno}: {fault}" for file, name, call in calls() if (fault := faults(file, name, call))]
    assert found == []


def test_the_rules_notice() -> None:
    for line in ("eval('1')", "torch.load(f)", "torch.load(f, weights_only=False)", "yaml.load(t, yaml.Loader)",
                 "pickle.loads(b)", "subprocess.run(c, shell=True)", "np.load(f, allow_pickle=True)",
                 "AutoConfig.from_pretrained(f)", "tar.extractall(f)"):  # fmt: skip
        (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
        assert faults("x.py", ast.unparse(call.func), call), line
