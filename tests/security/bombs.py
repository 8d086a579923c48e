"""Checkpoints, weights, tokenizers and templates that came from elsewhere."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from security.ground import Bomb, Ground, attempt, refused

CHECKPOINT, MODEL = "checkpoint", "model"


def _checkpoint(ground: Ground) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = ground.folder / "step-00000001"
    save({"model.a": torch.arange(6.0)}, checkpoint_id=folder / "state", no_dist=True)
    return folder


def _load(folder: Path) -> str:
    from shardwise.checkpoint.store import load_tensors

    return refused(lambda: load_tensors(folder, {"model.a": torch.zeros(6)}, None))


@attempt(CHECKPOINT, "a pickle bomb as the index")
def _(ground: Ground) -> str:
    folder = _checkpoint(ground)
    (folder / "state/.metadata").write_bytes(pickle.dumps(Bomb(ground.mark)))
    return _load(folder)


@attempt(CHECKPOINT, "a pickle bomb hidden in a sound index")
def _(ground: Ground) -> str:
    folder = _checkpoint(ground)
    index = folder / "state/.metadata"
    bomb: Any = Bomb(ground.mark)
    index.write_bytes(pickle.dumps(replace(pickle.loads(index.read_bytes()), planner_data=bomb)))
    return _load(folder)


@attempt(CHECKPOINT, "a pickle bomb in place of a tensor")
def _(ground: Ground) -> str:
    folder = _checkpoint(ground)
    (file,) = (folder / "state").glob("__0_0*")
    buffer = io.BytesIO()
    torch.save(Bomb(ground.mark), buffer)
    file.write_bytes(buffer.getvalue().ljust(file.stat().st_size, b"\0"))
    return _load(folder)


def _redirected(ground: Ground, name: str) -> str:
    from shardwise.core.safe_pickle import SafeReader

    folder = _checkpoint(ground)
    index = SafeReader(folder / "state").read_metadata()
    entries = {key: replace(info, relative_path=name) for key, info in index.storage_data.items()}
    (folder / "state/.metadata").write_bytes(pickle.dumps(replace(index, storage_data=entries)))
    return _load(folder)


@attempt(CHECKPOINT, "an index that names /etc/passwd")
def _(ground: Ground) -> str:
    return _redirected(ground, "/etc/passwd")


@attempt(CHECKPOINT, "an index that names ../../secret.txt")
def _(ground: Ground) -> str:
    return _redirected(ground, "../../secret.txt")


@attempt(CHECKPOINT, "a manifest that names ../secret.txt")
def _(ground: Ground) -> str:
    from shardwise.checkpoint.integrity import verify, write_manifest

    write_manifest(ground.folder, {"../secret.txt": (1, "0")})
    found = verify(ground.folder)
    assert found and "outside the checkpoint" in str(found[0]), found
    return str(found[0])


@attempt(CHECKPOINT, "DeepSpeed's `latest` file says ../../elsewhere")
def _(ground: Ground) -> str:
    from shardwise.deepspeed.store import find

    (ground.folder / "elsewhere/step-00000001").mkdir(parents=True)
    (ground.folder / "saved").mkdir()
    (ground.folder / "saved/latest").write_text("../elsewhere")
    return refused(lambda: find(ground.folder / "saved", None))


def _copy(ground: Ground) -> Path:
    return Path(shutil.copytree(ground.model, ground.folder / "model"))


def _start(ground: Ground, folder: Path | str) -> str:
    """Through the command line, as far as the weights' headers."""
    (ground.folder / "data.jsonl").write_text('{"text": "a b c d e f g"}\n' * 8)
    run = {"model": str(folder), "data": {"train": str(ground.folder / "data.jsonl"), "sequence_length": 16},
           "train": {"steps": 1, "batch_size": 1}, "device": "cpu", "ranks": 1, "precision": "fp32",
           "output": str(ground.folder / "out")}  # fmt: skip
    (ground.folder / "run.yaml").write_text(json.dumps(run))
    return ground.command("train", str(ground.folder / "run.yaml"))


@attempt(MODEL, "a pickle bomb as pytorch_model.bin")
def _(ground: Ground) -> str:
    folder = _copy(ground)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb(ground.mark)}, folder / "pytorch_model.bin")
    return _start(ground, folder)


def _code(ground: Ground, folder: Path, kind: str) -> None:
    """A module that writes the mark when it is imported."""
    (folder / "evil.py").write_text(f"open({str(ground.mark)!r}, 'w')\nclass Evil:\n    pass\n")
    file = folder / kind
    values = json.loads(file.read_text())
    values |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil",
                                                  "AutoTokenizer": ["evil.Evil", "evil.Evil"]}}  # fmt: skip
    if kind == "tokenizer_config.json":
        values |= {"tokenizer_class": "Evil"}
    file.write_text(json.dumps(values))


@attempt(MODEL, "a config.json that brings its own code (auto_map)")
def _(ground: Ground) -> str:
    folder = _copy(ground)
    _code(ground, folder, "config.json")
    return _start(ground, folder)


@attempt(MODEL, "a tokenizer that brings its own code (auto_map)")
def _(ground: Ground) -> str:
    from shardwise.nn.models.source import ModelSource

    folder = _copy(ground)
    _code(ground, folder, "tokenizer_config.json")
    (folder / "tokenizer.json").unlink()
    return refused(ModelSource("x", None, None, str(folder)).load_tokenizer)


@attempt(MODEL, "safetensors whose header claims to be 2^60 bytes long")
def _(ground: Ground) -> str:
    folder = _copy(ground)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return _start(ground, folder)


@attempt(MODEL, "safetensors whose tensors lie beyond the file")
def _(ground: Ground) -> str:
    folder = _copy(ground)
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [48], "data_offsets": [0, 1 << 40]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return _start(ground, folder)


@attempt(MODEL, "a weight index that names ../secret.txt")
def _(ground: Ground) -> str:
    folder = _copy(ground)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.a": "../secret.txt"}}))
    return _start(ground, folder)


@attempt(MODEL, "a GGUF file that claims 2^62 tensors")
def _(ground: Ground) -> str:
    file = ground.folder / "bad.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 1 << 62) + b"\0" * 64)
    return _start(ground, file)


@attempt(MODEL, "a pickle bomb as adapter_model.bin")
def _(ground: Ground) -> str:
    folder = ground.folder / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(ground.model), "r": 4, "lora_alpha": 8,
              "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.save(Bomb(ground.mark), folder / "adapter_model.bin")
    return ground.command("chat", str(folder), "--prompt", "Hi")


def _template(ground: Ground, template: str) -> str:
    from transformers import AutoTokenizer

    from shardwise.data.template import ChatTemplate, RowFault

    tokenizer = AutoTokenizer.from_pretrained(ground.tokenizer, trust_remote_code=False)
    tokenizer.chat_template = template
    try:
        found = ChatTemplate(tokenizer).render([{"role": "user", "content": "Hi"}])
    except RowFault as fault:
        return str(fault)
    return refused(lambda: found)


@attempt(MODEL, "a chat template that reaches for Python's classes")
def _(ground: Ground) -> str:
    path = "''.__class__.__mro__[1].__subclasses__()"
    return _template(ground, f"{{% for c in {path} %}}{{{{ c.__init__.__globals__ }}}}{{% endfor %}}")


@attempt(MODEL, "a chat template that changes what it is given")
def _(ground: Ground) -> str:
    return _template(ground, "{{ messages.append(1) }}")


@attempt(MODEL, "a chat template that counts to 10^12")
def _(ground: Ground) -> str:
    return _template(ground, "{% for i in range(1000000000000) %}x{% endfor %}")
