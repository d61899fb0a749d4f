"""The storage harness: how much a model's output changes when the KV of a prefix went through a codec.

A held-out document is cut into a prefix and a suffix. The prefix is prefilled once; its middle is coded and decoded,
its sinks and its last tokens stay as they are; the suffix is then teacher-forced on the changed cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.benchmarks.baselines import Coded
from sglang_kvtc.calibrate.causal_lm import continue_from, prefill
from sglang_kvtc.calibrate.corpus import Document, in_turn, tokenize
from sglang_kvtc.errors import ConfigError

SINK_TOKENS = 4
WINDOW_TOKENS = 128

Method = Callable[[torch.Tensor, torch.Tensor, int], Coded]
"""Codes and decodes (keys, values, start position): K after RoPE, [num_layers, num_tokens, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A prefilled prefix in the engine's cache dtype, a suffix, and the reference log-probabilities of the suffix.

    log_probs: f32[num_suffix_tokens, vocabulary], on the unchanged cache.
    """

    name: str
    keys: torch.Tensor
    values: torch.Tensor
    suffix: tuple[int, ...]
    log_probs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Quality:
    """Sums over the suffix tokens of one passage, and the bytes of its prefix.

    kl: KL divergence from the reference in nats. nll_increase: over the tokens after the first. coded_bytes and
    stored_bytes: 16-bit size and stored size of the coded tokens. prefix_bytes: 16-bit size of the whole prefix.
    """

    num_tokens: int
    kl: float
    nll_increase: float
    top1_equal: int
    coded_bytes: int
    stored_bytes: int
    prefix_bytes: int


def load_passages(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    count: int,
    prefix_tokens: int,
    suffix_tokens: int,
    cache_dtype: torch.dtype,
    seed: int,
) -> list[Passage]:
    """Prefill the first `count` documents, drawn in turn from their sources, that are long enough."""
    passages: list[Passage] = []
    for document in in_turn(documents, seed):
        if len(passages) == count:
            break
        token_ids = tokenize(document.text, tokenizer)[: prefix_tokens + suffix_tokens]
        if len(token_ids) == prefix_tokens + suffix_tokens:
            keys, values = (cache.to(cache_dtype) for cache in prefill(model, token_ids[:prefix_tokens]))
            suffix = tuple(token_ids[prefix_tokens:])
            passages.append(Passage(document.name, keys, values, suffix, _log_probs(model, keys, values, suffix)))
    if len(passages) < count:
        raise ConfigError(
            f"{len(passages)} held-out documents have {prefix_tokens + suffix_tokens} tokens, {count} were asked for"
        )
    return passages


def evaluate(model: Any, passage: Passage, method: Method) -> Quality:
    """Code the middle of the prefix with `method` and compare what the model says about the suffix."""
    stop = passage.keys.shape[1] - WINDOW_TOKENS
    middle = slice(SINK_TOKENS, stop)
    coded = method(passage.keys[:, middle], passage.values[:, middle], SINK_TOKENS)
    keys, values = passage.keys.clone(), passage.values.clone()
    keys[:, middle] = coded.keys
    values[:, middle] = coded.values
    log_probs = _log_probs(model, keys, values, passage.suffix)

    reference = passage.log_probs
    divergence = (reference.exp() * (reference - log_probs)).sum(dim=-1)
    labels = torch.tensor(passage.suffix[1:])[:, None]
    increase = reference[:-1].gather(1, labels) - log_probs[:-1].gather(1, labels)
    token_bytes = 2 * (passage.keys[:, 0].numel() + passage.values[:, 0].numel())
    return Quality(
        num_tokens=len(passage.suffix),
        kl=float(divergence.sum()),
        nll_increase=float(increase.sum()),
        top1_equal=int((reference.argmax(dim=-1) == log_probs.argmax(dim=-1)).sum()),
        coded_bytes=token_bytes * (stop - SINK_TOKENS),
        stored_bytes=coded.stored_bytes,
        prefix_bytes=token_bytes * passage.keys.shape[1],
    )


def summarize(results: Sequence[Quality]) -> dict[str, float]:
    """One row of `bench quality`: ratios over all passages, means over all suffix tokens."""
    num_tokens = sum(result.num_tokens for result in results)
    num_predicted = sum(result.num_tokens - 1 for result in results)
    coded = sum(result.coded_bytes for result in results)
    stored = sum(result.stored_bytes for result in results)
    prefix = sum(result.prefix_bytes for result in results)
    return {
        "ratio": coded / stored,
        "kl": sum(result.kl for result in results) / num_tokens,
        "dnll": sum(result.nll_increase for result in results) / num_predicted,
        "top1": sum(result.top1_equal for result in results) / num_tokens,
        "whole_prefix_ratio": prefix / (prefix - coded + stored),
    }


def _log_probs(model: Any, keys: torch.Tensor, values: torch.Tensor, suffix: Sequence[int]) -> torch.Tensor:
    return continue_from(model, keys, values, suffix).float().log_softmax(dim=-1)
