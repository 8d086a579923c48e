"""Packed and unpacked batches of the same documents give the same loss and the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.stores import write_store
from support.tiny import GPT2, LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.data.examples import Document
from shardwise.data.layout import CausalLayout
from shardwise.data.loader import IGNORE, Loader, MicroBatch
from shardwise.data.mixing import SourceStream
from shardwise.nn.objective import Loss
from shardwise.objectives.causal import CausalObjective

LENGTH, COUNT = 96, 40
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 12},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def streams(folder: Path) -> list[SourceStream]:
    """Two sources of documents of 4 to 96 tokens."""
    rng = np.random.default_rng(0)
    made = []
    for size in rng.integers(4, LENGTH + 1, COUNT):
        learned = rng.random(size) < 0.7
        learned[-1] = True
        made.append(Document("made", len(made), rng.integers(3, 515, size), learned))
    halves = made[: COUNT // 4], made[COUNT // 4 :]
    return [SourceStream(f"s{i}", write_store(folder / str(i), half)) for i, half in enumerate(halves)]


def computed(model: Any, loader: Loader, micro: int) -> tuple[Loss, dict[str, torch.Tensor]]:
    """Loss of an epoch, in all and by source, per learned token, and its gradients."""
    model.zero_grad()
    objective, size = CausalObjective(model), loader.epoch_sequences()
    total, by_source = torch.zeros(()), torch.zeros(len(loader.sources))
    batches = [loader.step(at, min(micro, size - at), micro, 0, 1) for at in range(0, size, micro)]
    count = sum(b.supervised for b in batches)
    for batch in batches:
        (one,) = batch.micro_batches
        loss = objective(model, one)
        (loss.total / count).backward()
        total, by_source = total + loss.total.detach() / count, by_source + loss.by_source
    learned = torch.tensor([b.by_source for b in batches]).sum(0)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Loss(total, by_source / learned, learned), grads


@pytest.mark.parametrize("name", MODELS)
def test_same_loss_and_gradients(name: str, tmp_path: Path) -> None:
    values = dict(MODELS[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.train()
    sources = streams(tmp_path)
    packed = Loader(sources, LENGTH, True, 1000, 0, CausalLayout(0))
    plain = Loader(sources, LENGTH, False, 1000, 0, CausalLayout(0))
    assert packed.epoch_sequences() < 0.7 * plain.epoch_sequences() == 0.7 * COUNT
    (loss, grads), (other, others) = computed(model, packed, 4), computed(model, plain, 4)
    apart = abs(loss.total - other.total).item() / other.total.item()
    # As vectors: single elements of an fp32 gradient are sums whose order packing changes.
    norm = torch.cat([g.flatten() for g in others.values()]).norm().item()
    worst = torch.cat([(grads[n] - others[n]).flatten() for n in others]).norm().item() / norm
    print(f"\n{name}: loss {apart:.1e}, gradients {worst:.1e} apart (relative)")
    assert grads.keys() == others.keys() and norm > 1e-3
    assert apart <= 1e-6 and worst <= 1e-6
    assert torch.allclose(loss.by_source, other.by_source, rtol=1e-6)
    assert not torch.allclose(loss.by_source[0], loss.by_source[1], rtol=1e-4), "the sources differ"


@pytest.mark.parametrize("sources", [1, 3])
def test_total_is_the_sum_as_it_was(sources: int) -> None:
    """The loss by source changes nothing: the total and its gradient are those of the plain sum."""
    torch.manual_seed(0)
    logits = (8 * torch.randn(4, 300, 515)).requires_grad_()
    labels = torch.randint(0, 515, (4, 300)).masked_fill(torch.rand(4, 300) < 0.3, IGNORE)
    where = torch.randint(0, sources, (4, 300))

    class Model:
        def forward(self, input_ids: Any, use_cache: bool = False) -> Any:
            return type("Output", (), {"logits": logits})

        __call__ = forward

    batch = MicroBatch(labels, labels, None, None, where if sources > 1 else None, sources)
    loss = CausalObjective(Model())(Model(), batch)
    flat = logits.flatten(0, 1)
    plain = torch.nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    assert abs(loss.total.item() - plain.item()) <= 1e-6 * plain.item()
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss.total, plain))
    assert torch.equal(ours, theirs)
    log_p = torch.log_softmax(logits.detach().double(), -1)
    for source in range(sources):
        own = (where == source) & (labels != IGNORE)
        expected = -log_p[own].gather(1, labels[own][:, None]).sum().item()
        assert loss.by_source[source].item() == pytest.approx(expected, rel=1e-6)
    assert len(loss.sums()) == (1 if sources == 1 else 4)
