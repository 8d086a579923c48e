"""Log-likelihoods of continuations under a model, in batches.

Requests of similar length share a padded batch; their common prefix (few-shot examples) goes through the model once and
is cached; requests that differ in their last token only (answers by letter) share a row.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.errors import UserError
from shardwise.nn.generate import context_length

TOKENS = {"cuda": 65536, "cpu": 8192}  # of a batch, the shared beginning counted for each row
LOGITS = 1 << 28  # elements of a batch's logits: 1 GiB in fp32
LEAST_SHARED = 16  # a beginning shorter than that is not worth a cache


@dataclass(frozen=True)
class Request:
    """Token ids; those from `begin` on are the continuation."""

    ids: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Likelihood:
    """Sum of log p over a continuation's tokens, and their number."""

    total: float
    tokens: int


def make_request(tokenizer: Any, context: str, continuation: str, special: bool = True) -> Request:
    """Tokenises both as one text; a token across the border belongs to the continuation."""
    coded = tokenizer(context + continuation, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    pairs = list(zip(coded["input_ids"], coded["offset_mapping"], strict=True))
    while pairs and pairs[-1][1][1] <= len(context):  # what a tokenizer puts at the end of every text
        pairs.pop()
    ids = [i for i, _ in pairs]
    begin = next((n for n, (_, (_, end)) in enumerate(pairs) if end > len(context)), len(pairs))
    if begin == 0:  # something must come before, to predict from
        start_token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [start_token or 0, *ids]
        begin = 1
    return Request(tuple(ids), begin)


def fit_context(model: Any, requests: Sequence[Request]) -> tuple[list[Request], int]:
    """Returns the requests truncated at the front to the model's context, and how many were."""
    context = context_length(model)
    if context is None:
        return list(requests), 0
    fitted = []
    cut = 0
    for request in requests:
        excess = len(request.ids) - 1 - context
        if excess > 0:
            if excess >= request.begin:
                problem = f"does not fit in the model's context of {context} tokens"
                raise UserError("choices", f"{len(request.ids) - request.begin} tokens", problem, "shorten it")
            request = Request(request.ids[excess:], request.begin - excess)
            cut = cut + 1
        fitted.append(request)
    return fitted, cut


@torch.no_grad()
def log_likelihoods(
    model: Any, requests: Sequence[Request], advance: Callable[[int], None] = lambda _: None
) -> list[Likelihood]:
    """Returns a likelihood for each request, in order; `advance` is called with the number done."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        rows.setdefault(request.ids[:-1], []).append(number)
    shared = _Shared(model, requests)
    results: list[Likelihood | None] = [None] * len(requests)
    order = sorted(rows, key=len, reverse=True)  # the largest batch first: what does not fit shows at once
    vocabulary = model.get_output_embeddings().weight.shape[0] if model.get_output_embeddings() is not None else 1
    budget = TOKENS[model.device.type if model.device.type in TOKENS else "cuda"]
    start = 0
    while start < len(order):
        batch = order[start : start + max(1, budget // max(1, len(order[start])))]
        while len(batch) > 1 and _logits(batch, rows, requests) * vocabulary > LOGITS:
            batch = batch[: len(batch) // 2]
        try:
            by_row = [[requests[n] for n in rows[row]] for row in batch]
            values = _batch(model, shared, batch, by_row)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                problem = "the device's memory is too small for it"
                raise UserError(
                    "prompt", f"{len(batch[0])} tokens", problem, "use fewer shots or a smaller model"
                ) from None
            budget //= 2
            continue
        for row, likelihoods in zip(batch, values, strict=True):
            for number, likelihood in zip(rows[row], likelihoods, strict=True):
                results[number] = likelihood
        advance(sum(len(rows[row]) for row in batch))
        start += len(batch)
    return [r for r in results if r is not None]


def _logits(
    batch: Sequence[tuple[int, ...]], rows: dict[tuple[int, ...], list[int]], requests: Sequence[Request]
) -> int:
    """Number of positions for which a batch needs logits."""
    first = min(requests[n].begin for row in batch for n in rows[row])
    return len(batch) * (max(map(len, batch)) + 1 - first)


class _Shared:
    """The prefix of all requests, and the model's cache of it; empty where it would not pay."""

    def __init__(self, model: Any, requests: Sequence[Request]) -> None:
        self.length = 0
        self._cache = None
        ids = [r.ids for r in requests]
        # Of sorted lists the first and the last differ earliest. Left in each row: the token before its continuation.
        length = min([_common(min(ids), max(ids)), *(r.begin - 1 for r in requests)]) if ids else 0
        if len(ids) < 2 or length < LEAST_SHARED:
            return
        from transformers import DynamicCache

        inputs = torch.tensor([ids[0][:length]], device=model.device)
        cache = getattr(model(input_ids=inputs, use_cache=True), "past_key_values", None)
        # Other kinds (sliding windows, states) forget or cannot be repeated.
        if isinstance(cache, DynamicCache) and all(type(x).__name__ == "DynamicLayer" for x in cache.layers):
            self.length = length
            self._cache = cache

    def cache(self, rows: int) -> Any:
        """Returns a copy for this many rows."""
        repeated = copy.deepcopy(self._cache)
        if repeated is not None:
            repeated.batch_repeat_interleave(rows)
        return repeated


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two lists."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _batch(
    model: Any, shared: _Shared, rows: Sequence[tuple[int, ...]], requests: Sequence[Sequence[Request]]
) -> list[list[Likelihood]]:
    start = shared.length
    width = max(len(row) for row in rows) - start
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), start + width, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row) - start] = torch.tensor(row[start:])
        mask[n, : len(row)] = 1
    first = min(r.begin for of_row in requests for r in of_row) - 1 - start
    inputs: dict[str, Any] = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    inputs |= {"past_key_values": shared.cache(len(rows)), "use_cache": True} if start else {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"], offset = width - first, start + first
    else:
        offset = start
    logits = model(**inputs).logits
    likelihoods = []
    for row_logits, row_requests in zip(logits, requests, strict=True):
        likelihoods.append([_sum(row_logits, request, offset) for request in row_requests])
    return likelihoods


def _sum(logits: torch.Tensor, request: Request, offset: int) -> Likelihood:
    """`offset` is the index in the request's ids of the first row of logits."""
    picked = logits[request.begin - 1 - offset : len(request.ids) - 1 - offset].float().log_softmax(-1)
    targets = torch.tensor(request.ids[request.begin :], device=logits.device)
    return Likelihood(float(picked.gather(1, targets[:, None]).double().sum()), len(targets))
