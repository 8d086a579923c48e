"""Parts of the vector: there and back, what rounding loses, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from shardwise.diloco import codec
from shardwise.diloco.codec import BadPart, Cutter, Joiner, VectorPlan, decode, encode, most_bytes


@pytest.mark.parametrize("dtype", codec.DTYPES)
def test_there_and_back(dtype: codec.Dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    body = encode(values, dtype)
    assert len(body) <= most_bytes(dtype, 1000)
    bound = {"fp32": 0.0, "bf16": 0.005, "int8": 0.01, "int4": 0.3, "int2": 0.36}[dtype]
    assert (decode(body, dtype, 1000) - values).norm() <= bound * values.norm()


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "int2"])
def test_what_rounding_lost_is_sent_later(dtype: codec.Dtype) -> None:
    values = torch.randn(512, generator=torch.Generator().manual_seed(1))
    lost, sent = torch.zeros(512), torch.zeros(512)
    for _ in range(20):
        sent += decode(encode(values, dtype, lost), dtype, 512)
    torch.testing.assert_close(sent + lost, 20 * values, rtol=1e-4, atol=1e-4)
    assert (sent / 20 - values).norm() < 0.2 * (decode(encode(values, dtype), dtype, 512) - values).norm()


@pytest.mark.parametrize("dtype", codec.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_numbers_are_refused(dtype: codec.Dtype, bad: float) -> None:
    values = torch.zeros(300)
    values[7] = bad
    with pytest.raises(BadPart, match="no numbers") as told:
        decode(encode(values, dtype), dtype, 300)
    assert not told.value.finite


def test_other_forms_are_refused() -> None:
    good = torch.zeros(10)
    for body in (b"", b"\x00" * 50, b"\xff" * 200, save({"other": good}), save({"values": good[:9].clone()}),
                 save({"values": good.double()}), save({"values": good, "more": good.clone()})):  # fmt: skip
        with pytest.raises(BadPart):
            decode(body, "fp32", 10)


def test_tensors_are_cut_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PART", 16)
    plan = VectorPlan((("a", (3, 7)), ("b", ()), ("c", (40,)), ("d", (2,))))
    whole = torch.arange(plan.total, dtype=torch.float32)
    tensors, at, cutter = [], 0, Cutter()
    parts = []
    for size in (21, 1, 40, 2):
        tensors.append(whole[at : at + size])
        parts.extend(cutter.put(tensors[-1]))
        at += size
    parts.extend(cutter.rest())
    assert [p.numel() for p in parts] == [plan.size(i) for i in range(plan.parts)]
    joiner = Joiner(iter(parts))
    for (_, shape), tensor in zip(plan.tensors, tensors, strict=True):
        assert torch.equal(joiner.take(shape), tensor)


def test_plans() -> None:
    plan = VectorPlan.read([["a", [2, 3]], ["b", []]])
    assert plan.total == 7 and plan.differs(plan) is None
    assert "shape [2, 3]" in str(plan.differs(VectorPlan.read([["a", [2, 4]], ["b", []]])))
    assert plan.differs(VectorPlan.read([["a", [2, 3]]])) == "trains b, which the others do not"
    assert VectorPlan.read([["a", [2, 3]]]).differs(plan) == "does not train b, which the others do"
    for wrong in (
        None,
        [],
        [["a"]],
        [["a", [0]]],
        [["a", [-1]]],
        [[1, [2]]],
        [["a", [1]], ["a", [1]]],
        [["a", [True]]],
    ):
        with pytest.raises(ValueError):
            VectorPlan.read(wrong)
