"""Sequences divided over ranks give what one process gives, loss and gradients, and send no more than they must."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import context
from support.ranks import run_ranks

from shardwise.core.errors import UserError
from shardwise.data.documents import Documents
from shardwise.data.loader import MicroBatch
from shardwise.foresight.zoo.run import tiny_case
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.context import blocks
from shardwise.parallel.context.mask import ContextMask, ContextRows, Scores, VisibilityRule, rule_of
from shardwise.parallel.context.ring import attend_whole
from shardwise.parallel.context.split import SequenceLayout, split_batch
from shardwise.parallel.context.support import examine
from shardwise.parallel.context.ulysses import repeat_heads

BOTH = ["ring", "ulysses"]
TEN = ["llama", "qwen3", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "gemma2", "gemma3_text", "opt", "llama4_text"]
PACKED = ["llama", "qwen3", "gpt2", "gpt_oss", "gemma2"]


def test_four_families_by_both_kinds() -> None:
    """Sinks and windows; positions that no one passes; a mixer that no registry knows."""
    assert run_ranks(context.families, 2, ["llama", "gpt_oss", "bart", "mamba"], "causal", BOTH) == [{}] * 2


@pytest.mark.slow
def test_ten_families_by_both_kinds() -> None:
    assert run_ranks(context.families, 2, TEN, "causal", BOTH) == [{}] * 2
    assert run_ranks(context.families, 2, ["bert", "roberta", "modernbert"], "masked", BOTH) == [{}] * 2


def test_packed_documents_equal_one_at_a_time() -> None:
    """Recomputed: bloom's attention, which is its own, gets whole rows once more in backward."""
    assert run_ranks(context.packed, 2, ["llama", "gemma2", "gpt_oss", "bloom"], BOTH, True) == [{}] * 2


@pytest.mark.slow
def test_packed_documents_of_more_families_on_more_ranks() -> None:
    for recomputed in (False, True):
        assert run_ranks(context.packed, 4, PACKED, BOTH, recomputed) == [{}] * 4


def test_under_fsdp_recomputed_and_undivided() -> None:
    assert run_ranks(context.sharded, 2, ["llama", "bloom", "jamba"]) == [{}] * 2


def test_padded_rows() -> None:
    assert run_ranks(context.padded, 2) == ["", ""]


def test_a_rotation_that_grows_sees_all_ranks() -> None:
    assert run_ranks(context.growing_rotation, 2) == ["", ""]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_a_ring(ranks: int) -> None:
    """Keys and values go on (n-1) times; in backward again, and their gradients with them (double is not widened)."""
    for apart, sent, sizes in run_ranks(context.wire_bytes, ranks, "ring"):
        assert apart < 1e-9
        hop = 2 * sizes["keys"]
        assert sent["forward"] == [hop] * (ranks - 1) * sizes["layers"]
        assert sent["backward"] == [hop] * 2 * (ranks - 1) * sizes["layers"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_ulysses(ranks: int) -> None:
    """Four all-to-alls forward and four backward; with more ranks than heads of keys, those go out repeated."""
    for apart, sent, sizes in run_ranks(context.wire_bytes, ranks, "ulysses"):
        assert apart < 1e-9
        keys = sizes["keys"] * ranks // 2
        each = sorted([sizes["queries"], sizes["queries"], keys, keys])
        for direction in ("forward", "backward"):
            calls = sent[direction]
            assert len(calls) == 4 * sizes["layers"]
            assert sorted(calls) == sorted(each * sizes["layers"])


def layout(rng: random.Random, ranks: int, rank: int, zigzag: bool) -> SequenceLayout:
    lengths = []
    width = 2 * ranks * rng.randint(1, 5)
    for _ in range(rng.randint(1, 3)):
        row: list[int] = []
        while sum(row) < width:
            row.append(min(rng.randint(1, 2 * width), width - sum(row)))
        lengths.append(row)
    documents = Documents.of_lengths(lengths)
    return SequenceLayout(documents, torch.ones(documents.rows, documents.width, dtype=torch.bool), ranks, rank, zigzag)


RULES = [
    VisibilityRule(True), VisibilityRule(True, window=3), VisibilityRule(True, window=9),
    VisibilityRule(True, chunk=4), VisibilityRule(), VisibilityRule(sides=3),
]  # fmt: skip


def brute_force(whole: Documents, rule: VisibilityRule) -> torch.Tensor:
    """(rows, width, width), token by token."""

    def sees(q: int, k: int, a: int, b: int, same: bool) -> bool:
        near = (rule.window is None or a - b < rule.window) and (rule.sides is None or abs(a - b) <= rule.sides)
        chunk = rule.chunk is None or a // rule.chunk == b // rule.chunk
        return same and near and chunk and (not rule.causal or k <= q)

    rows = zip(whole.positions.tolist(), whole.index.tolist(), strict=True)
    every = range(whole.width)
    seen = [[[sees(q, k, at[q], at[k], of[q] == of[k]) for k in every] for q in every] for at, of in rows]
    return torch.tensor(seen)


@pytest.mark.parametrize("seed", range(30))
def test_blocks_put_together(seed: int) -> None:
    """Every rank's blocks, merged, against softmax over all; heads, windows, softcaps, sinks and layouts at random."""
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks, zigzag = rng.choice([1, 2, 3]), rng.random() < 0.7
    whole = layout(rng, ranks, 0, zigzag)
    rule, keys = rng.choice(RULES), rng.choice([1, 2, 4])
    sinks = torch.randn(4, generator=made, dtype=torch.float64) if rng.random() < 0.5 else None
    scores = Scores(0.4, rng.choice([None, 2.0]), sinks)
    shapes = [(4, 6), (keys, 6), (keys, rng.choice([6, 5]))]
    rows, width = whole.rows, whole.documents.width
    q, k, v = (torch.randn(rows, h, width, d, generator=made, dtype=torch.float64) for h, d in shapes)
    wanted = reference(q, k, v, scores, brute_force(whole.documents, rule)[:, None])
    for rank in range(ranks):
        mine = SequenceLayout(whole.documents, whole.real, ranks, rank, zigzag)
        query = mine.take(q, dim=2)
        out = torch.zeros(*query.shape[:3], v.shape[-1], dtype=q.dtype)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=q.dtype)
        for other in range(ranks):
            if (block := blocks.block_of(mine, rule, scores, other)) is not None:
                at, seen = block.piece.queries, block.piece.keys
                found = block.forward(query[:, :, at], *(mine.take(x, other, 2)[:, :, seen] for x in (k, v)))
                out[:, :, at], lse[:, :, at] = blocks.merge(out[:, :, at], lse[:, :, at], *found)
        if sinks is not None:
            out, lse = blocks.add_attention_sinks(out, lse, sinks)
        torch.testing.assert_close(out, mine.take(wanted, dim=2), rtol=1e-9, atol=1e-9)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, seen: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    made = q @ k.transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        made = torch.tanh(made / scores.softcap) * scores.softcap
    made = made.masked_fill(~seen, float("-inf"))
    if scores.sinks is not None:
        column = scores.sinks.view(1, -1, 1, 1).expand(*made.shape[:3], 1)
        return F.softmax(torch.cat([made, column], -1), -1)[..., :-1] @ v
    return F.softmax(made, -1) @ v


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against differences, dropout and queries in several parts included."""
    monkeypatch.setattr(blocks, "QUERIES", 3)
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    whole, rule, keys = layout(rng, 1, 0, False), RULES[seed % len(RULES)], rng.choice([1, 2])
    rows, width = whole.rows, min(whole.documents.width, 12)
    whole = SequenceLayout(
        Documents.of_lengths([[width // 2, width - width // 2]] * rows), whole.real[:, :width], 1, 0, False
    )
    given = [
        torch.randn(rows, h, width, 3, generator=made, dtype=torch.float64).requires_grad_() for h in (2, keys, keys)
    ]
    given.append(torch.randn(2, generator=made, dtype=torch.float64).requires_grad_())
    dropout = 0.3 if seed % 2 else 0.0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return attend_whole(q, k, v, Scores(0.4, rng.choice([2.0]), sinks, dropout), whole, rule)

    assert torch.autograd.gradcheck(attend, given)


def test_dropout_keeps_the_mean() -> None:
    whole = SequenceLayout(Documents.of_lengths([[64]]), torch.ones(1, 64, dtype=torch.bool), 1, 0, False)
    q, v = torch.zeros(1, 1, 64, 4), torch.ones(1, 1, 64, 4)
    torch.manual_seed(0)
    out = torch.stack([attend_whole(q, q, v, Scores(1.0, dropout=0.5), whole, VisibilityRule()) for _ in range(50)])
    assert abs(out.mean() - 1) < 0.02 and out.std() > 0.05


def test_split_is_zigzag_and_pads_with_ignored_labels() -> None:
    ids = torch.arange(1, 15).view(1, 14)
    batch = MicroBatch(ids, ids.clone(), None, None, sources=torch.zeros_like(ids))
    parts = [split_batch(batch, 2, rank, zigzag=True)[0] for rank in range(2)]
    assert parts[0].input_ids.tolist() == [[1, 2, 3, 4, 13, 14, 0, 0]]
    assert parts[0].labels.tolist() == [[1, 2, 3, 4, 13, 14, -100, -100]]
    assert parts[1].input_ids.tolist() == [list(range(5, 13))]
    assert parts[1].position_ids is not None and parts[1].position_ids.tolist() == [list(range(4, 12))]
    short = MicroBatch(ids, ids, None, torch.tensor([[1] * 9 + [0] * 5]))
    assert split_batch(short, 2, 0, zigzag=True)[1].documents.lengths == (9, 7)
    left = MicroBatch(ids, ids, None, torch.tensor([[0] + [1] * 13]))
    with pytest.raises(UserError, match="padding is not at the end"):
        split_batch(left, 2, 0, zigzag=True)


def test_a_mask_that_is_computed_with_is_refused() -> None:
    ids = torch.arange(16).view(1, 16)
    part, whole = split_batch(MicroBatch(ids, ids, None, None), 2, 0, zigzag=True)
    never: Any = None
    mask = ContextMask(whole, VisibilityRule(True), never, ids.device)
    for touch in (lambda: mask + 1, lambda: torch.where(mask, 0, 1), lambda: mask[:, :, :2], lambda: mask.to(ids)):
        with pytest.raises(CannotParallelize, match="computes with its mask"):
            touch()
    rows = ContextRows(whole, never, ids.device)
    assert rows.bool().sum() == 8 and (part.input_ids * rows).tolist() == part.input_ids.tolist()
    with pytest.raises(CannotParallelize, match="rule of its own"):
        rows.for_blocks(never, q_length=8, kv_length=8, mask_function=lambda b, h, q, k: q > k)


def test_rules_are_read_from_the_functions_that_transformers_makes() -> None:
    from transformers import masking_utils as known

    none, some = torch.full((1, 4), -1), torch.tensor([[-1, 0, 0, -1]])
    assert rule_of(known.causal_mask_function) == VisibilityRule(causal=True)
    assert rule_of(known.sliding_window_causal_mask_function(5)) == VisibilityRule(causal=True, window=5)
    assert rule_of(known.chunked_causal_mask_function(6, none)) == VisibilityRule(causal=True, chunk=6)
    assert rule_of(known.bidirectional_mask_function) == VisibilityRule()
    assert rule_of(known.sliding_window_bidirectional_mask_function(7)) == VisibilityRule(sides=7)
    assert rule_of(known.or_masks(known.causal_mask_function, known.blockwise_overlay(none))) == VisibilityRule(
        causal=True
    )
    with pytest.raises(CannotParallelize, match="rule of its own"):
        rule_of(known.or_masks(known.causal_mask_function, known.blockwise_overlay(some)))


def test_heads_that_do_not_divide_are_told_with_those_that_would() -> None:
    keys = torch.zeros(1, 2, 3, 4)
    assert repeat_heads(keys, 12, 4).shape[1] == 4 and repeat_heads(keys, 12, 2) is keys
    with pytest.raises(
        CannotParallelize, match="12 heads over 2 of keys cannot be shared by 8 ranks, but by 1, 2, 3, 4, 6, 12 "
    ):
        repeat_heads(keys, 12, 8)


def test_what_a_model_needs_is_found_by_trying() -> None:
    found = examine(tiny_case("qwen3_next", "causal").model())
    assert found.whole.keys() == {"Qwen3NextGatedDeltaNet"} and not found.packed
    assert "documents in a row" in found.trouble
    assert examine(tiny_case("llama", "causal").model()).whole == {}
    with pytest.raises(CannotParallelize, match="lm_head"):
        examine(tiny_case("cpmant", "causal").model())


def test_positions_behind_the_padding() -> None:
    assert examine(tiny_case("roberta", "masked").model()).convention.behind
    assert not examine(tiny_case("bert", "masked").model()).convention.behind
