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
from sglang_kvtc.calibrate.corpus import Document, TokenSequence, in_turn, tokenize
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
class Change:
    """How far a model's output moved on one suffix: sums over its tokens.

    kl: KL divergence from the reference in nats. nll_increase: over the tokens after the first. top1_equal: number of
    tokens after which both expect the same.
    """

    num_tokens: int
    kl: float
    nll_increase: float
    top1_equal: int


@dataclass(frozen=True, slots=True)
class Quality:
    """The change on the suffix of one passage, and the bytes of its prefix.

    coded_bytes and stored_bytes: 16-bit size and stored size of the coded tokens. prefix_bytes: 16-bit size of the
    whole prefix.
    """

    change: Change
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
    """Prefill the beginnings of `count` documents, drawn as `first_sequences` draws them."""
    passages: list[Passage] = []
    for sequence in first_sequences(documents, tokenizer, count, prefix_tokens + suffix_tokens, seed):
        keys, values = (cache.to(cache_dtype) for cache in prefill(model, sequence.token_ids[:prefix_tokens]))
        suffix = sequence.token_ids[prefix_tokens:]
        passages.append(Passage(sequence.name, keys, values, suffix, log_probs(model, keys, values, suffix)))
    return passages


def first_sequences(
    documents: Sequence[Document], tokenizer: Any, count: int, num_tokens: int, seed: int
) -> list[TokenSequence]:
    """The first `num_tokens` tokens of the first `count` documents that have as many, drawn in turn from their sources.

    Raises ConfigError when there are too few such documents.
    """
    sequences: list[TokenSequence] = []
    for document in in_turn(documents, seed):
        if len(sequences) == count:
            break
        token_ids = tokenize(document.text, tokenizer)[:num_tokens]
        if len(token_ids) == num_tokens:
            sequences.append(TokenSequence(document.name, tuple(token_ids)))
    if len(sequences) < count:
        raise ConfigError(f"{len(sequences)} held-out documents have {num_tokens} tokens, {count} were asked for")
    return sequences


def evaluate(model: Any, passage: Passage, method: Method) -> Quality:
    """Code the middle of the prefix with `method` and compare what the model says about the suffix."""
    stop = passage.keys.shape[1] - WINDOW_TOKENS
    middle = slice(SINK_TOKENS, stop)
    coded = method(passage.keys[:, middle], passage.values[:, middle], SINK_TOKENS)
    keys, values = passage.keys.clone(), passage.values.clone()
    keys[:, middle] = coded.keys
    values[:, middle] = coded.values
    token_bytes = 2 * (passage.keys[:, 0].numel() + passage.values[:, 0].numel())
    return Quality(
        change=compare(passage.log_probs, log_probs(model, keys, values, passage.suffix), passage.suffix),
        coded_bytes=token_bytes * (stop - SINK_TOKENS),
        stored_bytes=coded.stored_bytes,
        prefix_bytes=token_bytes * passage.keys.shape[1],
    )


def compare(reference: torch.Tensor, changed: torch.Tensor, suffix: Sequence[int]) -> Change:
    """Compare two log-probabilities of one suffix: reference and changed, f32[num_suffix_tokens, vocabulary]."""
    divergence = (reference.exp() * (reference - changed)).sum(dim=-1)
    labels = torch.tensor(suffix[1:])[:, None]
    increase = reference[:-1].gather(1, labels) - changed[:-1].gather(1, labels)
    return Change(
        num_tokens=len(suffix),
        kl=float(divergence.sum()),
        nll_increase=float(increase.sum()),
        top1_equal=int((reference.argmax(dim=-1) == changed.argmax(dim=-1)).sum()),
    )


def means(changes: Sequence[Change]) -> dict[str, float]:
    """`kl`, `dnll` (nats) and `top1` (share of equal first choices) per token, over all suffixes."""
    num_tokens = sum(change.num_tokens for change in changes)
    num_predicted = sum(change.num_tokens - 1 for change in changes)
    return {
        "kl": sum(change.kl for change in changes) / num_tokens,
        "dnll": sum(change.nll_increase for change in changes) / num_predicted,
        "top1": sum(change.top1_equal for change in changes) / num_tokens,
    }


def summarize(results: Sequence[Quality]) -> dict[str, float]:
    """One row of `bench quality`: ratios over all passages, means over all suffix tokens."""
    coded = sum(result.coded_bytes for result in results)
    stored = sum(result.stored_bytes for result in results)
    prefix = sum(result.prefix_bytes for result in results)
    return {
        "ratio": coded / stored,
        **means([result.change for result in results]),
        "whole_prefix_ratio": prefix / (prefix - coded + stored),
    }


def log_probs(model: Any, keys: torch.Tensor, values: torch.Tensor, suffix: Sequence[int]) -> torch.Tensor:
    """What the model expects after every token of `suffix` on a given cache: f32[num_suffix_tokens, vocabulary]."""
    return continue_from(model, keys, values, suffix).float().log_softmax(dim=-1)
