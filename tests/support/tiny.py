"""A tokenizer of 512 words trained on the spot, and configs of models with a hundred thousand parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.config.advanced import as_written
from shardwise.config.objectives import Task

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAIRS = Path(__file__).parents[2] / "src/shardwise/demo/pairs.jsonl"

LLAMA = dict(
    model_type="llama",
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=515,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
TIED = LLAMA | {"tie_word_embeddings": True}
GPT2 = dict(
    model_type="gpt2",
    n_embd=48,
    n_layer=3,
    n_head=4,
    vocab_size=515,
    n_positions=512,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)

QWEN3_MOE = LLAMA | dict(
    model_type="qwen3_moe", hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=16
)


def tokenizer_folder(folder: Path, template: str | None = CHATML) -> str:
    """Trains and saves the tokenizer (under a second)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return str(folder)
    text = [m["content"] for line in PAIRS.read_text().splitlines() for m in json.loads(line)["messages"]]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    raw.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=515,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def saved_model(folder: Path, config: dict[str, Any], seed: int = 0, task: Task = "causal") -> str:
    """Random weights and a tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoConfig

    from shardwise.nn.models.tasks import auto_class

    if not (folder / "config.json").exists():
        values = dict(config)
        torch.manual_seed(seed)
        model = auto_class(task).from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        model.save_pretrained(folder)
    return tokenizer_folder(folder)


def rows_of_pairs(folder: Path) -> None:
    """The pairs as rows for other tasks: pairs.jsonl (source and target) and texts.jsonl."""
    chats = [json.loads(line)["messages"] for line in PAIRS.read_text().splitlines()]
    pairs = [{"source": c[-2]["content"], "target": c[-1]["content"]} for c in chats]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": row["target"]}) + "\n" for row in pairs))


def tiny_run(tmp: Path, model: Any = None, **changes: Any) -> dict[str, Any]:
    """A run of a few seconds: 20 steps of 12 packed sequences; `changes` are paths in Run with __ for dots."""
    run: dict[str, Any] = {
        "model": model or {"config": LLAMA, "tokenizer": tokenizer_folder(tmp / "tokenizer")},
        "data": {"train": str(PAIRS), "sequence_length": 192},
        "train": {
            "steps": 20,
            "batch_size": 12,
            "micro_batch_size": 1,
            "learning_rate": 3e-3,
            "warmup": 0,
            "max_grad_norm": 0.5,
        },
        "precision": "fp32",
        "device": "cpu",
        "parallel": {},
        "checkpoint": {"every": None},
        "output": str(tmp / "out"),
    }
    return as_written(changed(run, changes))


def changed(run: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The run with values at dotted paths that have __ for dots."""
    for path, value in changes.items():
        place = run
        *parents, leaf = path.split("__")
        for part in parents:
            place = place.setdefault(part, {})
        place[leaf] = value
    return run
