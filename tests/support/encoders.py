"""Tiny encoders and encoder–decoders, with tokenizers of their families trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.tiny import PAIRS, changed

_SMALL: dict[str, Any] = dict(vocab_size=400, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_BERT = _SMALL | dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=130
)
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": dict(
        model_type="t5", vocab_size=400, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
    ),
    "bart": dict(
        model_type="bart", vocab_size=400, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, dropout=0.0,
        attention_dropout=0.0,
    ),
    "bert": dict(model_type="bert", **_BERT),
    "roberta": dict(model_type="roberta", **_BERT),
    "distilbert": dict(
        model_type="distilbert", vocab_size=400, dim=32, hidden_dim=64, n_layers=2, n_heads=2, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=130,
    ),
}  # fmt: skip
KINDS = {"t5": "unigram", "bart": "bytes", "bert": "wordpiece", "roberta": "bytes", "distilbert": "wordpiece"}


def sentences() -> list[str]:
    """Real sentences: the demo's questions and answers."""
    return [m["content"] for line in PAIRS.read_text().splitlines() for m in json.loads(line)["messages"]]


def make_tokenizer(kind: str) -> Any:
    """A tokenizer of 400 words: wordpiece (BERT's), bytes (RoBERTa's and BART's) or unigram (T5's)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    more: dict[str, Any] = {"vocab_size": 400, "show_progress": False}
    if kind == "wordpiece":
        names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        raw.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(special_tokens=list(names.values()), **more)
    elif kind == "bytes":
        names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=list(names.values()), initial_alphabet=alphabet, **more)
    else:
        names = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
        raw = Tokenizer(models.Unigram())
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(special_tokens=list(names.values()), unk_token="<unk>", **more)
    raw.train_from_iterator(sentences(), trainer)
    ids = {name: raw.token_to_id(word) for name, word in names.items()}
    if kind == "wordpiece":
        ends = [(names[n], ids[n]) for n in ("cls", "sep")]
        pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
        raw.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0", pair=pair, special_tokens=ends
        )
    elif kind == "bytes":
        raw.post_processor = processors.RobertaProcessing(("</s>", ids["eos"]), ("<s>", ids["bos"]))
        names |= {"cls": "<s>", "sep": "</s>"}
    else:
        raw.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", ids["eos"])]
        )
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if kind == "wordpiece" else [])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, model_input_names=inputs, **{f"{name}_token": word for name, word in names.items()}
    )


def encoder_tokenizer(folder: Path, model: str) -> str:
    """The tokenizer of a tiny model, saved."""
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(KINDS[model]).save_pretrained(folder)
    return str(folder)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def rows_for(objective: str, count: int = 64) -> list[dict[str, Any]]:
    """Rows that can be learned: a target that repeats its source's words, texts, and texts with a class."""
    texts = [" ".join(text.split()[:12]) for text in sentences()][:count]
    if objective == "seq2seq":
        return [{"source": text, "target": " ".join(text.split()[:4])} for text in texts]
    if objective == "masked":
        return [{"text": text} for text in texts]
    return [{"text": text, "label": "long" if len(text) > 60 else "short"} for text in texts]


def encoder_run(tmp: Path, model: str, objective: str, /, **changes: Any) -> dict[str, Any]:
    """A run of a few steps from scratch; `changes` are dotted paths with __ for dots."""
    run: dict[str, Any] = {
        "model": {"config": CONFIGS[model], "tokenizer": encoder_tokenizer(tmp / f"tokenizer-{KINDS[model]}", model)},
        "objective": objective,
        "data": {"train": write_rows(tmp / f"{objective}.jsonl", rows_for(objective)), "sequence_length": 64},
        "train": {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "learning_rate": 5e-3, "warmup": 0},
        "precision": "fp32",
        "device": "cpu",
        "checkpoint": {"every": None},
        "output": str(tmp / "out"),
    }
    return changed(run, changes)
