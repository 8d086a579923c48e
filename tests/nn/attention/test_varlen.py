"""Packed rows give what their documents give alone; whatever cannot be attended to by documents gets the right mask."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import packed
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder
from torch import nn
from transformers import LlamaConfig

from shardwise.core.errors import UserError
from shardwise.data.documents import Documents
from shardwise.nn.attention import varlen as attention
from shardwise.nn.attention.document_mask import DocumentMask, RowsMask
from shardwise.parallel import selfcheck

BOUND = 1e-6
BY_DOCUMENTS = [
    *("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3"),
    *("gemma2", "gpt_oss"),  # a softcap, sinks
]


@pytest.mark.parametrize("kind", packed.MODELS)
def test_packed_equals_one_document_at_a_time(kind: str) -> None:
    model = packed.tiny(kind)
    batch = packed.rows(packed.LAYOUT)
    reference = packed.alone(model, *batch)
    loss, gradients = packed.distance(packed.packed(model, *batch), reference)
    print(f"\n{kind}: loss {loss:.1e}, gradients {gradients:.1e}")
    assert loss <= BOUND and gradients <= BOUND
    again = packed.distance(packed.packed(packed.recomputed(model), *batch), reference)
    assert max(again) <= BOUND, f"recomputed: {again}"


def no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a mask was built, or the positions were looked at")

    monkeypatch.setattr(DocumentMask, "real", property(refuse))
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", refuse)


@pytest.mark.parametrize("kind", BY_DOCUMENTS)
def test_no_mask_is_built_and_no_position_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the seams in transformers move: the path would then be right, but no longer the fast one."""
    model = packed.tiny(kind)
    no_mask(monkeypatch)
    packed.packed(packed.recomputed(model), *packed.rows(packed.LAYOUT))
    if kind != "gpt_oss":  # transformers' own masks of it do not look at positions, and documents see each other
        with pytest.raises(AssertionError, match="looked at"):
            packed.packed(model, *packed.rows(packed.LAYOUT), plain=True)


def test_other_batches_are_not_touched() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    model = packed.tiny("mistral").eval()
    ids, _, _ = packed.rows(packed.LAYOUT)
    padding = torch.ones_like(ids)
    padding[:, 30:] = 0
    ours = [model(input_ids=ids, attention_mask=m, use_cache=False).logits for m in (None, padding)]
    registries = [(AttentionInterface, "sdpa"), (AttentionMaskInterface, "sdpa"), (AttentionMaskInterface, "eager")]
    installed = [(r, n, r._global_mapping[n]) for r, n in registries]
    try:
        for registry, name, function in installed:
            stock = function.args[0]
            assert not attention._is_ours(stock), "installed twice"
            registry.register(name, stock)
        theirs = [model(input_ids=ids, attention_mask=m, use_cache=False).logits for m in (None, padding)]
    finally:
        for registry, name, function in installed:
            registry.register(name, function)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def random_layout(rng: random.Random) -> list[list[int]]:
    return [[rng.randint(1, 24) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("seed", range(24))
def test_random_layouts(seed: int) -> None:
    """The attention function alone, with heads, windows and layouts at random, against SDPA with the whole mask."""
    rng = random.Random(seed)
    documents = Documents.of_lengths(random_layout(rng))
    mask = DocumentMask(documents, rng.choice([None, 1, 2, 5, 16]))
    keys = rng.choice([1, 2, 4])
    made = torch.Generator().manual_seed(seed)
    shapes = [(4, 12), (keys, 12), (keys, rng.choice([12, 8]))]
    tensors = [
        torch.randn(documents.rows, h, documents.width, d, generator=made, dtype=torch.float64).requires_grad_()
        for h, d in shapes
    ]
    scale = rng.choice([None, 0.7])
    seen = brute_force(documents, mask.window)
    assert torch.equal(mask.real[:, 0], seen)
    query, key, value = tensors
    reference = F.scaled_dot_product_attention(
        query, key.repeat_interleave(4 // keys, 1), value.repeat_interleave(4 // keys, 1), seen[:, None], scale=scale
    ).transpose(1, 2)
    module = nn.Module()
    module.num_key_value_groups = 4 // keys  # type: ignore[assignment]
    output, _ = attend(module, *tensors, mask, scaling=scale)
    assert output.shape == reference.shape
    torch.testing.assert_close(output, reference, rtol=1e-9, atol=1e-9)
    weight = torch.randn(reference.shape, generator=made, dtype=torch.float64)
    ours = torch.autograd.grad((output * weight).sum(), tensors)
    theirs = torch.autograd.grad((reference * weight).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch documents of its kernel, in plain operations."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (query, key, value)) and bounds_q.dtype == torch.int32
    assert longest_q == longest_k == int(bounds_q.diff().max()) and enable_gqa
    group = query.shape[1] // key.shape[1]
    outputs = []
    for start, stop in zip(bounds_q[:-1].tolist(), bounds_k[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        left, right = window_size
        hidden = (-back > right) | ((back > left) if left >= 0 else torch.zeros_like(back, dtype=torch.bool))
        scores = (q @ k.repeat_interleave(group, 0).mT * scale).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("seed", range(12))
def test_the_call_of_the_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no such kernel; a plain one that takes its arguments literally stands in for it."""
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    monkeypatch.setattr(attention, "KERNEL_TYPES", (torch.float64,))
    monkeypatch.setattr(attention, "_one_by_one", None)
    rng = random.Random(100 + seed)
    documents = Documents.of_lengths([*random_layout(rng), [3, 4]])
    mask = DocumentMask(documents, rng.choice([None, 1, 2, 5, 16]), largest_head=16)
    keys = rng.choice([1, 2, 4])
    shapes = [(4, 12), (keys, 12), (keys, rng.choice([16, 12, 8]))]
    made = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(documents.rows, h, documents.width, d, generator=made, dtype=torch.float64) for h, d in shapes
    )
    scale = rng.choice([None, 0.7])
    output, _ = attend(nn.Module(), query, key, value, mask, scaling=scale)
    reference = F.scaled_dot_product_attention(
        query, key, value, brute_force(documents, mask.window)[:, None], scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(output, reference.transpose(1, 2), rtol=1e-9, atol=1e-9)


def test_what_the_kernel_cannot_do_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(name: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError(f"reached {name}")

        return refuse

    monkeypatch.setattr(attention, "_in_one_kernel", reached("varlen"))
    monkeypatch.setattr(attention, "attend_capped", reached("capped"))
    packed_mask = DocumentMask(Documents.of_lengths([[3, 4]]), None, largest_head=16)
    ones = DocumentMask(Documents.of_lengths([[1] * 7]), None, largest_head=16)
    half = torch.randn(1, 2, 7, 16, dtype=torch.bfloat16)
    wide = torch.randn(1, 2, 7, 24, dtype=torch.bfloat16)
    sinks = {"s_aux": torch.zeros(2)}
    for kernel, more in (("varlen", {}), ("capped", {"softcap": 30.0}), ("capped", sinks)):
        with pytest.raises(AssertionError, match=f"reached {kernel}"):
            attend(nn.Module(), half, half, half, packed_mask, **more)
    for tensor, mask, more in (
        (half.float(), packed_mask, {}),
        (wide, packed_mask, {}),
        (half, packed_mask, {"dropout": 0.1}),
        (half.float(), packed_mask, {"softcap": 30.0}),
        (wide, packed_mask, sinks),
        (half, packed_mask, {"softcap": 30.0, "dropout": 0.1}),
        (half, packed_mask, {"position_bias": torch.zeros(1, 2, 7, 7, dtype=torch.bfloat16)}),
        (half, ones, {}),
        (half, DocumentMask(Documents.of_lengths([[7]]), None, largest_head=16), {}),
    ):
        attend(nn.Module(), tensor, tensor, tensor, mask, **more)


def test_a_compiled_block_is_not_compiled_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole graphs, and no guard on the lengths; the kernel is left out, so that a CPU can run it."""
    from torch._dynamo.testing import CompileCounter

    monkeypatch.setattr(attention, "KERNEL_TYPES", (torch.float32,))
    monkeypatch.setattr(attention, "largest_head", lambda device: 256)
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v, *args, **kwargs: q * 1.0)
    model = packed.tiny("llama")
    counter = CompileCounter()
    torch._dynamo.reset()
    for _, block in packed.find_blocks(model):
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    for seed in range(8):
        rng = random.Random(seed)
        lengths = [rng.randint(2, 9) for _ in range(rng.randint(2, 5))]
        ids, labels, documents = packed.rows([[*lengths, 60 - sum(lengths)]])
        packed.packed(model, ids, labels, documents)
    assert counter.frame_count <= 3 * len(packed.find_blocks(model))


def attend(*args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return attention.attend_documents(sdpa_attention_forward, *args, **kwargs)


def brute_force(documents: Documents, window: int | None) -> torch.Tensor:
    """Token by token, in plain Python."""
    owner = [n for n, length in enumerate(documents.lengths) for _ in range(length)]
    width = documents.width
    sees = torch.zeros(documents.rows, width, width, dtype=torch.bool)
    for row in range(documents.rows):
        for q in range(width):
            for k in range(q + 1):
                near = window is None or q - k < window
                sees[row, q, k] = near and owner[row * width + q] == owner[row * width + k]
    return sees


def test_documents_from_positions_and_from_lengths_agree() -> None:
    rng = random.Random(0)
    for _ in range(50):
        layout = random_layout(rng)
        documents = Documents.of_lengths(layout)
        positions = documents.positions
        again = Documents.of_positions(positions)
        assert again.lengths == documents.lengths and torch.equal(again.boundaries, documents.boundaries)
        for row, lengths in zip(positions, layout, strict=True):
            rest = documents.width - sum(lengths)
            assert row.tolist() == [p for n in [*lengths, rest] for p in range(n)]
        assert documents.longest == max(documents.lengths)
        assert documents.alone == (max(map(len, layout)) == 1 and len({sum(r) for r in layout}) == 1)


def test_a_boundary_off_by_one_is_noticed() -> None:
    """By the comparison that the tests above rest on: each boundary, moved one token to either side."""
    model = packed.tiny("llama")
    ids, labels, documents = packed.rows([[13, 20, 5]])
    reference = packed.alone(model, ids, labels, documents)
    for layout in ([12, 21, 5], [14, 19, 5], [13, 19, 6], [13, 21, 4], [33, 5], [13, 25]):
        other = Documents.of_lengths([layout])
        positions = documents.positions
        logits = model(input_ids=ids, position_ids=positions, attention_mask=RowsMask(other), use_cache=False).logits
        loss = packed._loss(logits, labels).item()
        assert abs(loss - reference[0]) / reference[0] > 100 * BOUND, layout


def check(model: nn.Module) -> None:
    sharded: Any = packed.Alone(model)
    selfcheck.check_model(sharded, packed.WORDS, True, "the-model", torch.device("cpu"), documents=True)


@pytest.mark.parametrize("kind", packed.MODELS)
def test_the_self_check_passes(kind: str) -> None:
    check(packed.tiny(kind))


def test_the_self_check_notices_a_boundary_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    length = selfcheck.LENGTH

    class Off(Documents):
        @classmethod
        def of_positions(cls, positions: Any) -> Documents:
            return Documents.of_lengths([[length - 1, length + 1]])

    monkeypatch.setattr(selfcheck, "Documents", Off)
    with pytest.raises(UserError, match="packed documents see each other"):
        check(packed.tiny("llama"))


def test_the_self_check_notices_positions_that_do_not_restart() -> None:
    model = packed.tiny("opt")
    model.model.decoder.embed_positions.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
    )
    with pytest.raises(UserError, match="for a packed document than for the document alone"):
        check(model)


def test_states_are_refused() -> None:
    """Nothing of this reaches a recurrence."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=packed.WORDS, hidden_size=48, num_hidden_layers=2, state_size=8)
    with pytest.raises(UserError, match="packed documents see each other"):
        check(AutoModelForCausalLM.from_config(config))


def test_models_that_attend_by_other_means_are_left_alone() -> None:
    class Flash(nn.Module):
        config = LlamaConfig()

    Flash.config._attn_implementation = "flash_attention_2"

    assert not attention.install(Flash())


def test_masks_become_tensors_when_computed_with() -> None:
    documents = Documents.of_lengths([[3, 2], [4]])
    mask = DocumentMask(documents, 2)
    real = brute_force(documents, 2)[:, None]
    scores = torch.randn(2, 1, 5, 5)
    value = torch.randn(2, 1, 5, 4)
    assert mask.shape == real.shape and mask.dtype == real.dtype and mask.ndim == mask.dim() == 4
    assert mask.size(-1) == 5 and mask.size() == real.shape
    for use in (
        lambda m: torch.where(m, scores, 0.0),
        lambda m: scores.masked_fill(~m, -1.0),
        lambda m: scores + m,
        lambda m: m * scores,
        lambda m: m[:, :, :, :3],
        lambda m: m == 0,
        lambda m: m.to(torch.float32),
        lambda m: torch.cat([m, m], 1),
        lambda m: F.scaled_dot_product_attention(value, value, value, attn_mask=m),
    ):
        assert torch.equal(use(mask), use(real))
    rows = RowsMask(documents)
    assert isinstance(rows.to(dtype=torch.bool).view(2, -1), RowsMask) and torch.equal(
        rows.cumsum(-1)[0] - 1, torch.arange(5)
    )
    assert torch.equal((1.0 - rows.float()) * 5, torch.zeros(2, 5)) and not isinstance(rows[:, -3:], RowsMask)
    assert copy.copy(mask).documents is documents


def test_dropout_is_applied_per_document() -> None:
    documents = Documents.of_lengths([[5, 7]])
    x = torch.ones(1, 2, 12, 8)
    torch.manual_seed(0)
    output, _ = attend(nn.Module(), x, x, x, DocumentMask(documents, None), dropout=0.5)
    assert not torch.equal(output, torch.ones_like(output))
    assert torch.equal(attend(nn.Module(), x, x, x, DocumentMask(documents, None))[0], torch.ones(1, 12, 2, 8))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    tokenizer_folder(folder / "tokenizer")
    return folder


def test_two_ranks_recomputed_without_a_mask(shared: Path) -> None:
    run = tiny_run(shared, parallel__zero=3, recompute="full")
    for ours, plain in run_ranks(packed.train_twice, 2, run):
        assert max(abs(a - b) / b for a, b in zip(ours, plain, strict=True)) <= BOUND


def test_a_model_that_chokes_on_it_goes_the_plain_way(shared: Path) -> None:
    """Sharded over two ranks: what the failed forward left behind must not disturb the next."""
    run = tiny_run(shared, parallel__zero=3)
    for said, without, with_it in run_ranks(packed.broken_then_plain, 2, run):
        assert said == ["attention: plain for this model (no such kernel)"]
        assert abs(without - with_it) / with_it <= BOUND


@pytest.mark.parametrize("width", [13, 16])
def test_a_bias_lies_as_kernels_want_it(width: int) -> None:
    """SDPA copies one whose rows do not begin at multiples of 8, and keeps the copy, in every layer."""
    positions = torch.cat([torch.arange(width - 6), torch.arange(6)])[None].repeat(2, 1)
    mask = DocumentMask(Documents.of_positions(positions), None)
    bias = mask.bias(torch.float32)
    assert torch.equal(bias == 0, mask.real) and bias.shape == (2, 1, width, width)
    assert all(stride % 8 == 0 for stride in (bias.stride(0), bias.stride(2))) and bias.stride(3) == 1
    assert mask.bias(torch.float32) is bias
