"""The mistakes that newcomers make, each through the real command line: one message, the way out, and nothing written.

The message has the field, the value and a line that begins with → and says what to do. There is no traceback, and no
file appears but in the cache.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import LLAMA, saved_model, tokenizer_folder

from shardwise.cli.main import main

GOOD = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'
RUN: dict[str, Any] = {
    "model": "model",
    "data": {"train": "chat.jsonl", "sequence_length": 64},
    "train": {"steps": 2, "batch_size": 4},
    "device": "cpu",
    "output": "out",
}
Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class Mistake:
    """One mistake: what the message must hold, what differs from a good run, and how it is started."""

    name: str
    message: tuple[str, ...]  # its beginning, field and value; then words that must follow
    remedy: str
    run: dict[str, Any] | str | None = field(default_factory=dict)  # changes (dotted paths), the whole text, or no file
    args: tuple[str, ...] = ("train", "run.yaml")
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Prepare | None = None
    env: dict[str, str] = field(default_factory=dict)


def chat(*messages: Any) -> dict[str, str | bytes]:
    """A data file whose second line holds these messages."""
    return {"chat.jsonl": GOOD + json.dumps({"messages": list(messages)}) + "\n"}


def said(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def ds(**keys: Any) -> dict[str, str | bytes]:
    """A DeepSpeed config beside the run."""
    return {"ds.json": json.dumps({"train_batch_size": 4} | keys)}


def edit_config(**changes: Any) -> Prepare:
    def edit(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def remove(*names: str) -> Prepare:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def tear(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def tear_indexed(folder: Path) -> None:
    """The index names a second file that was never copied."""
    file = folder / "model" / "model.safetensors"
    with file.open("rb") as f:
        names = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    names.pop("__metadata__", None)
    second = "model.norm.weight"
    places = {name: "part-2.safetensors" if name == second else file.name for name in names}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def no_template(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    saved = folder / "model"
    tokenizer_folder(saved, template=None)
    for file in MODEL[0].iterdir():
        if file.name.startswith(("config", "model")):
            shutil.copy(file, saved)


def plain_folder(folder: Path) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "notes.txt").write_text("no checkpoint")


def other_model(kind: str, architecture: str) -> Prepare:
    def write(folder: Path) -> None:
        from safetensors.torch import save_file

        (folder / "bert").mkdir()
        config = {"model_type": kind, "architectures": [architecture]}
        (folder / "bert" / "config.json").write_text(json.dumps(config))
        save_file({"x": torch.zeros(1)}, folder / "bert" / "model.safetensors")

    return write


MODEL: list[Path] = []
SCRATCH = {"config": LLAMA, "tokenizer": "model"}
MISTAKES = [
    # RUN.yaml itself
    Mistake("no RUN.yaml", ("RUN.yaml = 'run.yaml'", "no such file"), "demo --write", run=None),
    Mistake("RUN.yaml misspelled", ("RUN.yaml = 'rum.yaml'", "no such file"), "run.yaml?", args=("train", "rum.yaml")),
    Mistake("RUN.yaml is a folder", ("RUN.yaml = '.'", "folder"), "YAML file itself", args=("train", ".")),
    Mistake("RUN.yaml is empty", ("RUN.yaml = 'run.yaml'", "no settings"), "data: {train:", run=""),
    Mistake("RUN.yaml is prose", ("RUN.yaml = 'run.yaml'", "a str"), "key: value", run="train my model please"),
    Mistake("YAML syntax", ("RUN.yaml = 'run.yaml:3'", "begun on line 2"), "quotes", run="model: m\ndata: {train: a\n"),
    Mistake("YAML tab", ("RUN.yaml = 'run.yaml:3'", "not valid YAML"), "tabs", run="model: m\ndata:\n\ttrain: a\n"),
    Mistake("YAML key twice", ("data.train: ", "given twice (again at run.yaml:4)"), "keep one",
            run="model: m\ndata:\n  train: a\n  train: b\n"),
    # keys and values
    Mistake("unknown key", ("train.learning_rat = 0.1", "run.yaml:"), "train.learning_rate?",
            {"train.learning_rat": 0.1}),
    Mistake("key in the wrong section", ("learning_rate = 0.1", "unknown key"), "train.learning_rate?",
            {"learning_rate": 0.1}),
    Mistake("key of another trainer", ("train.max_steps = 7", "unknown key"), "train.steps?", {"train.max_steps": 7}),
    Mistake("wrong type", ("train.steps = 'many'", "a whole number"), "optimizer steps", {"train.steps": "many"}),
    Mistake("yes for a number", ("parallel.zero = True", "not true or false"), "ZeRO stage", {"parallel.zero": True}),
    Mistake("zero 5", ("parallel.zero = 5", "at most 3"), "ZeRO stage", {"parallel.zero": 5}),
    Mistake("unknown choice", ("precision = 'float32'", "'fp32'"), "did you mean fp32?", {"precision": "float32"}),
    Mistake("unknown unit", ("timeout = '10 hours'", "'hours'"), "10min", {"timeout": "10 hours"}),
    Mistake("section that is a value", ("data = 'chat.jsonl'", "section"), "{train: chat.jsonl}",
            {"data": "chat.jsonl"}),
    Mistake("no model", ("model: ", "is required, but run.yaml"), "model: smollm2", {"model": None}),
    Mistake("no data", ("data: ", "is required, but run.yaml"), "{train: chat.jsonl}", {"data": None}),
    Mistake("override without =", ("override = 'train.steps'", "key.path=value"), "train.learning_rate=1e-4",
            args=("train", "run.yaml", "train.steps")),
    Mistake("override of an unknown key", ("train.step = 3", "on the command line"), "train.steps?",
            args=("train", "run.yaml", "train.step=3")),
    Mistake("config of an unknown key", ("trian = 1", "on the command line"), "train?",
            args=("config", "run.yaml", "trian=1")),
    Mistake("config without a file", ("RUN.yaml: ", "is needed"), "config RUN.yaml", args=("config",)),
    # a DeepSpeed config
    Mistake("no DeepSpeed config", ("parallel.deepspeed = 'dsx.json'", "no such file"), "ds.json?",
            {"parallel.deepspeed": "dsx.json"}, files=ds()),
    Mistake("DeepSpeed config with a comma too many", ("parallel.deepspeed = 'ds.json:2'", "not valid JSON"), "commas",
            {"parallel.deepspeed": "ds.json"}, files={"ds.json": '{"train_batch_size": 4,\n}'}),
    Mistake("unknown key of a DeepSpeed config", ("ds.json: gradient_cliping = 1", "unknown key"), "gradient_clipping?",
            {"parallel.deepspeed": "ds.json"}, files=ds(gradient_cliping=1)),
    Mistake("refused key of a DeepSpeed config", ("ds.json: elasticity: ", "is refused"), "train_batch_size",
            {"parallel.deepspeed": "ds.json"}, files=ds(elasticity={"enabled": True})),
    Mistake("DeepSpeed config against RUN.yaml", ("ds.json: train_batch_size = 8", "train.batch_size = 4"), '"auto"',
            {"parallel.deepspeed": "ds.json"}, files=ds(train_batch_size=8)),
    Mistake("DeepSpeed batch that does not multiply", ("ds.json: train_batch_size = 4", "3 × gradient"), "use 3",
            {"parallel.deepspeed": "ds.json"}, files=ds(train_micro_batch_size_per_gpu=3)),
    Mistake("schedule of DeepSpeed misspelled", ("train.schedule.warmup_steps = 3", "unknown key"), "warmup_num_steps?",
            {"train.schedule": {"type": "WarmupLR", "warmup_steps": 3}}),
    Mistake("loss scale below its least", ("advanced.loss_scale.initial = 1", "below minimum = 4"), "raise initial",
            {"advanced.loss_scale": {"initial": 1, "minimum": 4}}),
    Mistake("CSV below a file", ("log.csv = 'chat.jsonl/csv'", "chat.jsonl is a file"), "may write",
            {"log.csv": "chat.jsonl/csv"}),
    Mistake("config from no DeepSpeed config", ("parallel.deepspeed = 'x.json'", "no such file"), "DeepSpeed config",
            args=("config", "--from-deepspeed", "x.json")),
    # ranks and devices
    Mistake("batch not divisible", ("train.batch_size = 4", "among 3 ranks"), "use 3 or 6", {"ranks": 3}),
    Mistake("micro batch not dividing", ("train.micro_batch_size = 3", "4 sequences per rank"), "[1, 2, 4]",
            {"train.micro_batch_size": 3}),
    Mistake("shard not dividing", ("parallel.dp_shard_size = 3", "does not divide the 4 ranks"), "[1, 2, 4]",
            {"ranks": 4, "parallel.dp_shard_size": 3}),
    Mistake("shard at stage 0", ("parallel.dp_shard_size = 2", "stage 0"), "1, 2 or 3",
            {"ranks": 2, "parallel.dp_shard_size": 2, "parallel.zero": 0}),
    Mistake("secondary shard below stage 3", ("parallel.hpz_size = 2", "once a step anyway"), "zero: 3",
            {"ranks": 4, "parallel.hpz_size": 2, "parallel.zero": 2}),
    Mistake("secondary shard not dividing", ("parallel.hpz_size = 3", "does not divide the group of 4"),
            "[2], or leave it out", {"ranks": 4, "parallel.hpz_size": 3, "parallel.zero": 3}),
    Mistake("secondary shard larger than the first", ("parallel.hpz_size = 4", "larger than the group of 2"),
            "leave it out", {"ranks": 4, "parallel.hpz_size": 4, "parallel.dp_shard_size": 2, "parallel.zero": 3}),
    Mistake("int8 weights at stage 0", ("parallel.quantize_weights = True", "gathers no weights"), "1, 2 or 3",
            {"ranks": 2, "parallel.quantize_weights": True, "parallel.zero": 0}),
    Mistake("parameters offloaded below stage 3", ("offload.parameters = 'cpu'", "stage 2 holds all parameters"),
            "zero: 3", {"parallel.zero": 2, "offload.optimizer": "cpu", "offload.parameters": "cpu"}),
    Mistake("parameters offloaded before the optimizer", ("offload.parameters = 'disk'", "optimizer's states"),
            "offload.optimizer: cpu or disk", {"parallel.zero": 3, "offload.parameters": "disk"}),
    Mistake("parameters offloaded in fp16", ("offload.parameters = 'cpu'", "overflow"), "bf16 or fp32",
            {"parallel.zero": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu", "precision": "fp16"}),
    Mistake("a folder and nothing on disk", ("offload.disk = 'scratch'", "nothing is offloaded to disk"),
            "offload.optimizer: disk", {"offload.optimizer": "cpu", "offload.disk": "scratch"}),
    Mistake("a share of nothing", ("offload.ratio = 0.5", "no optimizer state leaves"), "offload.optimizer: cpu",
            {"offload.ratio": 0.5}),
    Mistake("a share over one", ("offload.ratio = '150%'", "at most 1"), "of the optimizer's states",
            {"offload.optimizer": "cpu", "offload.ratio": "150%"}),
    Mistake("a disk of another name", ("offload.optimizer = 'nvme'", "'disk'"), "did you mean disk?",
            {"offload.optimizer": "nvme"}),
    Mistake("muon offloaded", ("offload.optimizer = 'cpu'", "muon looks at whole matrices"), "adamw",
            {"offload.optimizer": "cpu", "train.optimizer": "muon"}),
    Mistake("activations without recomputation", ("offload.activations = 'cpu'", "recompute is none"),
            "recompute: full", {"offload.activations": "cpu"}),
    Mistake("offload to a file", ("offload.disk = ", "chat.jsonl", "cannot be written"), "you may write to",
            {"offload.optimizer": "disk", "offload.disk": "chat.jsonl"}),
    Mistake("offload into a file", ("offload.disk = ", "chat.jsonl/scratch", "cannot be written"), "you may write to",
            {"offload.optimizer": "disk", "offload.disk": "chat.jsonl/scratch"}),
    Mistake("in backward with clipping", ("train.optimizer_in_backward = True", "norm of all gradients"),
            "train.max_grad_norm: null", {"train.optimizer_in_backward": True}),
    Mistake("in backward with fp16", ("train.optimizer_in_backward = True", "loss scale"), "bf16 or fp32",
            {"train.optimizer_in_backward": True, "train.max_grad_norm": None, "precision": "fp16"}),
    Mistake("in backward with muon", ("train.optimizer_in_backward = True", "muon works over all ranks"), "adamw",
            {"train.optimizer_in_backward": True, "train.max_grad_norm": None, "train.optimizer": "muon"}),
    Mistake("bucket of nothing", ("advanced.bucket = 0",), "largest buffer", {"advanced.bucket": 0}),
    Mistake("feedback of nothing", ("advanced.error_feedback = True", "no gradient is quantised"),
            "quantize_gradients: true", {"ranks": 2, "advanced.error_feedback": True}),
    Mistake("bucket in an unknown unit", ("advanced.bucket = '200 blocks'",), "largest buffer",
            {"advanced.bucket": "200 blocks"}),
    Mistake("int4 gradients at stage 0", ("parallel.quantize_gradients = True", "all-reduces"), "1, 2 or 3",
            {"ranks": 2, "parallel.quantize_gradients": True, "parallel.zero": 0}),
    Mistake("cuda without a GPU", ("device = 'cuda'", "no CUDA device"), "device: cpu", {"device": "cuda"}),
    Mistake("unknown below advanced", ("advanced.buckets = 1", "unknown key (at run.yaml:"),
            "did you mean advanced.bucket?", {"advanced.buckets": 1}),
    Mistake("advanced is no section", ("advanced.fp8 = 16", "expected a section"), "advanced.fp8 takes min_features",
            {"advanced.fp8": 16}),
    Mistake("of another method", ("advanced.method.double_quant = False", "unknown key"), "a setting of qlora",
            {"method": "lora", "advanced.method.double_quant": False}),
    Mistake("nccl on a CPU", ("advanced.backend = 'nccl'", "CUDA devices only"), "gloo", {"advanced.backend": "nccl"}),
    Mistake("left-over launcher", ("WORLD_SIZE = 'x'", "no count"), "unset WORLD_SIZE", env={"WORLD_SIZE": "x"}),
    Mistake("launcher of another size", ("ranks = 2", "launcher started 4"), "leave ranks out", {"ranks": 2},
            env={"WORLD_SIZE": "4"}),
    # output and resume
    Mistake("output below a file", ("output = 'chat.jsonl/out'", "chat.jsonl is a file"), "may write",
            {"output": "chat.jsonl/out"}),
    Mistake("output is a file", ("output = 'chat.jsonl'", "is a file"), "may write", {"output": "chat.jsonl"}),
    Mistake("resume from no checkpoint", ("resume = 'old'", "is no checkpoint"), "use", {"resume": "old"},
            prepare=plain_folder),
    Mistake("resume from nowhere", ("resume = 'old'", "there is no such checkpoint"), "never", {"resume": "old"}),
    # data files
    Mistake("no data file", ("data.train.0 = 'chats.jsonl'", "no such file"), "relative to",
            {"data.train": "chats.jsonl"}),
    Mistake("no evaluation file", ("data.eval.0 = 'held.jsonl'", "no such file"), "relative to",
            {"data.eval": "held.jsonl"}),
    Mistake("glob without match", ("data.train.0 = 'rows/*.jsonl'", "matches no"), "check the path",
            {"data.train": "rows/*.jsonl"}),
    Mistake("csv without rows", ("data.train.0 = 'rows.csv'", "holds no rows"), "check the file",
            {"data.train": "rows.csv"}, files={"rows.csv": "a,b\n"}),
    Mistake("unknown kind", ("data.train.0 = 'rows.xyz'", ".xyz"), "JSONL", {"data.train": "rows.xyz"},
            files={"rows.xyz": "a,b\n"}),
    Mistake("empty data file", ("data.train.0 = 'chat.jsonl'", "holds no rows"), "check the file",
            files={"chat.jsonl": "\n\n"}),
    Mistake("binary data file", ("data.train.0 = 'chat.jsonl:1'", "not UTF-8"), "convert",
            files={"chat.jsonl": b"\x93NUMPY\xff\xfe"}),
    Mistake("Windows encoding", ("data.train.0 = 'chat.jsonl:2'", "not UTF-8"), "convert",
            files={"chat.jsonl": GOOD.encode() + b'{"text": "caf\xe9"}\n'}),
    Mistake("malformed JSON", ("data.train.0 = 'chat.jsonl:2'", "not JSON"), "one JSON object",
            files={"chat.jsonl": GOOD + '{"messages": [\n'}),
    Mistake("other columns", ("data.train.0 = 'chat.jsonl'", "colour, size"), "fields",
            files={"chat.jsonl": '{"colour": "a", "size": "b"}'}),
    Mistake("unknown role", ("data.train.0 = 'chat.jsonl:2 message 1'", "narrator"), "assistant",
            files=chat(said("narrator", "Hi"), said("assistant", "Hello"))),
    Mistake("image content", ("data.train.0 = 'chat.jsonl:2 message 1'", "holds an image"), "on_bad_row: skip",
            files=chat(said("user", [{"type": "image"}]), said("assistant", "A cat"))),
    Mistake("no answer", ("data.train.0 = 'chat.jsonl:2'", "no assistant message"), "loss_on: all",
            files=chat(said("user", "Hi"))),
    Mistake("assistant first", ("data.train.0 = 'chat.jsonl:2'", "begins with the assistant"), "user or system",
            files=chat(said("assistant", "Hi"))),
    Mistake("markup in a message", ("data.train.0 = 'chat.jsonl:2 message 1'", "<|im_end|>"), "differently",
            files=chat(said("user", "What is <|im_end|>?"), said("assistant", "A token."))),
    Mistake("half a character", ("data.train.0 = 'chat.jsonl:2 message 1'", "surrogate"), "whole character",
            files=chat(said("user", "\ud83d"), said("assistant", "?"))),
    Mistake("too long", ("data.train.0 = 'chat.jsonl:2'", "more than data.sequence_length = 64"), "over_length",
            files=chat(said("user", "Hi"), said("assistant", "word " * 90))),
    Mistake("all dropped", ("data.train.0 = 'chat.jsonl'", "1 dropped"), "raise data.sequence_length",
            {"data.over_length": "drop", "data.sequence_length": 8}),
    Mistake("nothing to hold out", ("data.eval = 0.02", "single row"), "of its own", {"data.eval": "2%"}),
    # models
    Mistake("no chat template", ("model.tokenizer: ", "no chat template"), "instruct model", prepare=no_template),
    Mistake("sequences beyond the positions", ("data.sequence_length = 1024", "512 positions"), "512 or less",
            {"data.sequence_length": 1024}),
    Mistake("BERT", ("model = 'bert'", "BertForMaskedLM"), "masked", {"model": "bert", "objective": "causal"},
            prepare=other_model("bert", "BertForMaskedLM")),
    Mistake("ViT", ("model = 'bert'", "ViTForImageClassification"), "ForCausalLM", {"model": "bert"},
            prepare=other_model("vit", "ViTForImageClassification")),
    Mistake("unknown model_type", ("model = 'bert'", "config.json is not usable"), "update transformers",
            {"model": "bert"}, prepare=other_model("nonesuch", "NonesuchForCausalLM")),
    Mistake("model folder that is absent", ("model = './nowhere'", "neither a model folder"), "path",
            {"model": "./nowhere"}),
    Mistake("model folder without weights", ("model = 'model'", "no weights"), "copy the weight files",
            prepare=remove("model/model.safetensors")),
    Mistake("model folder without config", ("model = 'model'", "no config.json"), "save_pretrained",
            prepare=remove("model/config.json")),
    Mistake("config.json that is no JSON", ("model = 'model'", "config.json is not usable"), "update transformers",
            files={"model/config.json": "{"}),
    Mistake("model folder without tokenizer", ("model.tokenizer = 'model'", "no tokenizer"), "tokenizer.json",
            prepare=remove("model/tokenizer.json", "model/tokenizer_config.json")),
    Mistake("hub id that cannot be fetched", ("model = 'someone/some-model'", "could not be fetched"), "spelling",
            {"model": "someone/some-model"}),
    Mistake("revision of a folder", ("model.revision = 'main'", "folder"), "remove",
            {"model": {"name": "model", "revision": "main"}}),
    Mistake("gguf that is absent", ("model = 'a.gguf'", "no such file"), "path", {"model": "a.gguf"}),
    Mistake("gguf that is none", ("model = 'a.gguf'", "cannot read this GGUF"), "Hugging Face folder",
            {"model": "a.gguf"}, files={"a.gguf": b"GGUX"}),
    Mistake("torn weights", ("model = 'model/model.safetensors'", "is damaged"), "fetch", prepare=tear),
    Mistake("weight file that is missing", ("model = 'model/part-2.safetensors'", "is missing"), "fetch",
            prepare=tear_indexed),
    Mistake("weight index that is no index", ("model = 'model/model.safetensors.index.json'", "not a valid"), "fetch",
            files={"model/model.safetensors.index.json": "[]"}),
    Mistake("weights of another shape", ("model = 'model/model.safetensors'", "gate_proj.weight has shape [96, 48]"),
            "different models", prepare=edit_config(intermediate_size=128)),
    Mistake("weights of fewer layers", ("model = 'model'", "lack model.layers.3"), "different models",
            prepare=edit_config(num_hidden_layers=4)),
    Mistake("weights of another size", ("model = 'model/model.safetensors'", "has shape [515, 48]"), "different models",
            prepare=edit_config(vocab_size=600)),
    Mistake("unknown type from scratch", ("model.config.model_type = 'lama'", "no such model"), "llama?",
            {"model": SCRATCH | {"config": LLAMA | {"model_type": "lama"}}}),
    Mistake("misspelled key from scratch", ("model.config.hidden_sise = 8", "llama has no such key"), "hidden_size?",
            {"model": SCRATCH | {"config": LLAMA | {"hidden_sise": 8}}}),
    Mistake("bad value from scratch", ("model.config = ", "hidden_size", "expected int"), "transformers",
            {"model": SCRATCH | {"config": LLAMA | {"hidden_size": "big"}}}),
    Mistake("heads that do not divide", ("model.config = ", "not a multiple"), "transformers",
            {"model": SCRATCH | {"config": LLAMA | {"hidden_size": 50}}}),
    Mistake("vocabulary too small", ("model.tokenizer: ", "the model knows 100"), "vocab_size",
            {"model": SCRATCH | {"config": LLAMA | {"vocab_size": 100}}}),
    Mistake("tokenizer that is absent", ("model.tokenizer = 'nowhere/at/all'", "no tokenizer"), "tokenizer.json",
            {"model": SCRATCH | {"tokenizer": "nowhere/at/all"}}),
    # the other commands
    Mistake("export of nothing", ("checkpoint = 'missing'", "no such folder"), "output folder",
            args=("export", "missing", "target")),
    Mistake("export of no checkpoint", ("checkpoint = 'model'", "a Hugging Face folder already"), "output folder",
            args=("export", "model", "target")),
    Mistake("export in an unknown type", ("--dtype = 'int3'", "not known"), "bf16",
            args=("export", "missing", "target", "--dtype", "int3")),
    Mistake("export in an unknown size", ("--shard-size = 'big'", "4GiB"), "4GiB",
            args=("export", "missing", "target", "--shard-size", "big")),
    Mistake("chat with nobody", ("model = './nobody'", "neither a model folder"), "path", args=("chat", "./nobody")),
    Mistake("chat with a folder of no model", ("model = 'old'", "no config.json"), "save_pretrained",
            args=("chat", "old", "-p", "Hi"), prepare=plain_folder),
    Mistake("chat with BERT", ("model = 'bert'", "BertForMaskedLM"), "a causal model",
            args=("chat", "bert", "-p", "Hi"), prepare=other_model("bert", "BertForMaskedLM")),
]  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "model"
    saved_model(folder, LLAMA)
    MODEL[:] = [folder]
    return folder


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a newcomer: a model, a data file, and a cache that is nobody's."""
    place = tmp_path / "here"
    place.mkdir()
    shutil.copytree(model, place / "model")
    (place / "chat.jsonl").write_text(GOOD)
    monkeypatch.chdir(place)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return place


def run_file(changes: dict[str, Any] | str) -> str:
    if isinstance(changes, str):
        return changes
    run = json.loads(json.dumps(RUN))
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        place = run
        for part in parents:
            place = place.setdefault(part, {})
        place[leaf] = value
    return yaml.safe_dump({key: value for key, value in run.items() if value is not None}, sort_keys=False)


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_mistake(
    mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if mistake.name == "cuda without a GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for name, content in mistake.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if mistake.prepare is not None:
        mistake.prepare(folder)
    if mistake.run is not None:
        (folder / "run.yaml").write_text(run_file(mistake.run))
    for name, text in mistake.env.items():
        monkeypatch.setenv(name, text)
    before = everything(folder)
    capfd.readouterr()

    with pytest.raises(SystemExit) as left:
        main(list(mistake.args))

    out, err = capfd.readouterr()
    lines = err.strip().splitlines()
    assert left.value.code not in (0, None)
    assert "Traceback" not in out + err
    assert len(lines) == 2, f"not one message:\n{err}"
    begin, *rest = mistake.message
    assert lines[0].startswith(f"error: {begin}"), f"{begin!r} does not begin:\n{err}"
    assert all(words in lines[0] for words in rest), f"{rest} not in:\n{err}"
    assert lines[1].startswith("  → ") and mistake.remedy in lines[1], f"{mistake.remedy!r} not in:\n{err}"
    assert everything(folder) == before, "something was written"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB; the model's states take some megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("where", [("disk", "none"), ("cpu", "disk"), ("disk", "disk")], ids="+".join)
def test_a_full_disk(folder: Path, small_disk: Path, where: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Told before any process starts, with nothing left there."""
    changes = {"offload.optimizer": where[0], "offload.parameters": where[1], "parallel.zero": 3}
    (folder / "run.yaml").write_text(run_file(changes | {"offload.disk": str(small_disk / "scratch")}))
    before = everything(folder)
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["train", "run.yaml"])
    lines = capfd.readouterr().err.strip().splitlines()
    assert left.value.code == 2 and len(lines) == 2, lines
    told = rf"error: offload.disk = '{re.escape(str(small_disk))}/scratch': has [\d.]+ KiB free; .* take [\d.]+ [KM]iB"
    assert re.fullmatch(told, lines[0]), lines
    assert lines[1].startswith("  → free some space")
    assert everything(folder) == before and not list(small_disk.iterdir())


def test_a_disk_that_fills_up_before_the_first_step(small_disk: Path) -> None:
    """Room is reserved, not hoped for: what another has taken since the check is found when the files are made."""
    from shardwise.core.errors import UserError
    from shardwise.parallel.offload.disk import DiskFolder

    with DiskFolder(small_disk / "scratch", 0, 1) as disk:
        disk.create("first.bin", 100_000)
        with pytest.raises(UserError, match="No space left on device"):
            disk.create("second.bin", 1_000_000)
    assert not list(small_disk.iterdir())


def test_a_folder_in_use(tmp_path: Path) -> None:
    """Two runs in one folder would write over each other's states."""
    from shardwise.core.errors import UserError
    from shardwise.parallel.offload.disk import DiskFolder

    with DiskFolder(tmp_path / "scratch", 0, 2) as first:
        file = first.create("optimizer.bin", 10_000)
        file.mapped(0, 10_000).fill_(7)
        with DiskFolder(tmp_path / "scratch", 0, 1) as second, pytest.raises(UserError, match="another run works"):
            second.create("optimizer.bin", 10_000)
        DiskFolder(tmp_path / "scratch", 0, 0)  # of fewer ranks: rank 0's files look left over, but are in use
        assert (file.mapped(0, 10_000) == 7).all() and file.path.exists()
    assert not list(tmp_path.iterdir())


def test_the_run_without_a_mistake_is_fine(folder: Path) -> None:
    """Each mistake differs from this run by itself alone, so what it meets is its own message."""
    from shardwise.launch.trainer import Trainer

    (folder / "run.yaml").write_text(run_file({}))
    before = everything(folder)
    job = Trainer(folder / "run.yaml").prepare()
    assert job.run.train.steps == 2 and job.data.total("documents") == 1
    assert everything(folder) == before


def test_names_are_unique_and_there_are_enough() -> None:
    names = [m.name for m in MISTAKES]
    assert len(set(names)) == len(names) >= 30
