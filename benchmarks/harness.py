"""The storage harness: how much a model's output changes when the KV of a prefix went through a codec.

A held-out document is cut into a prefix and a suffix. The prefix is prefilled once; its middle is coded and decoded,
its sinks and its last tokens stay as they are; the suffix is then teacher-forced on the changed cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.benchmarks.baselines import Coded
from sglang_kvtc.calibrate.causal_lm import continue_from, prefill
from sglang_kvtc.calibrate.corpus import (
    BUILTIN,
    Document,
    TokenSequence,
    in_turn,
    read_documents,
    split_documents,
    tokenize,
)
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
class PositionChanges:
    """How far a model's output moved after every token of one suffix: tensors over its tokens.

    kl: f32[num_tokens], in nats. nll: f32[num_tokens - 1], of the reference, of each token after the first, in nats;
    nll_increase: beside it. top1_equal: bool[num_tokens], whether both expect the same.
    """

    kl: torch.Tensor
    nll: torch.Tensor
    nll_increase: torch.Tensor
    top1_equal: torch.Tensor

    def sums(self) -> Change:
        """The change on the whole suffix."""
        return Change(
            num_tokens=len(self.kl),
            kl=float(self.kl.sum()),
            nll_increase=float(self.nll_increase.sum()),
            top1_equal=int(self.top1_equal.sum()),
        )


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


def add_passage_arguments(
    parser: argparse.ArgumentParser, documents: int, prefix_tokens: int, suffix_tokens: int
) -> None:
    """Which held-out text, with these sizes by default."""
    parser.add_argument("--documents", type=int, default=documents, help="held-out documents (default %(default)s)")
    parser.add_argument(
        "--prefix-tokens", type=int, default=prefix_tokens, help="cached context of each (default %(default)s)"
    )
    parser.add_argument(
        "--suffix-tokens", type=int, default=suffix_tokens, help="tokens scored after it (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default %(default)s)")


def held_out_passages(args: argparse.Namespace, model: Any, tokenizer: Any, cache_dtype: torch.dtype) -> list[Passage]:
    """The built-in held-out text that `add_passage_arguments` ask for."""
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    return load_passages(
        model,
        tokenizer,
        held_out,
        count=args.documents,
        prefix_tokens=args.prefix_tokens,
        suffix_tokens=args.suffix_tokens,
        cache_dtype=cache_dtype,
        seed=args.seed,
    )


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


def evaluate(
    model: Any,
    passage: Passage,
    method: Method,
    *,
    sink_tokens: int = SINK_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
) -> Quality:
    """Code the prefix with `method`, except sinks and window, and compare what the model says about the suffix."""
    stop = passage.keys.shape[1] - window_tokens
    middle = slice(sink_tokens, stop)
    coded = method(passage.keys[:, middle], passage.values[:, middle], sink_tokens)
    keys, values = passage.keys.clone(), passage.values.clone()
    keys[:, middle] = coded.keys
    values[:, middle] = coded.values
    token_bytes = 2 * (passage.keys[:, 0].numel() + passage.values[:, 0].numel())
    return Quality(
        change=compare(passage.log_probs, log_probs(model, keys, values, passage.suffix), passage.suffix),
        coded_bytes=token_bytes * (stop - sink_tokens),
        stored_bytes=coded.stored_bytes,
        prefix_bytes=token_bytes * passage.keys.shape[1],
    )


def compare(reference: torch.Tensor, changed: torch.Tensor, suffix: Sequence[int]) -> Change:
    """Compare two log-probabilities of one suffix: reference and changed, f32[num_suffix_tokens, vocabulary]."""
    return compare_positions(reference, changed, suffix).sums()


def compare_positions(reference: torch.Tensor, changed: torch.Tensor, suffix: Sequence[int]) -> PositionChanges:
    """What `compare` adds up, token by token."""
    labels = torch.tensor(suffix[1:])[:, None]
    nll, changed_nll = (-log_probs[:-1].gather(1, labels)[:, 0] for log_probs in (reference, changed))
    return PositionChanges(
        kl=(reference.exp() * (reference - changed)).sum(dim=-1),
        nll=nll,
        nll_increase=changed_nll - nll,
        top1_equal=reference.argmax(dim=-1) == changed.argmax(dim=-1),
    )


def position_rows(changes: Sequence[PositionChanges], first_position: int, bin_tokens: int) -> list[dict[str, object]]:
    """Means over documents and `bin_tokens` neighbouring positions: a curve of the error against the position.

    changes: of suffixes of one length that begin at `first_position`. Each row has `position`, the first of its bin,
    `tokens`, `kl` and `kl_se` (over documents, where there are several), `nll` of the reference, `dnll`, and `top1`.
    """
    rows: list[dict[str, object]] = []
    num_tokens = len(changes[0].kl)
    for start in range(0, num_tokens, bin_tokens):
        window = slice(start, min(start + bin_tokens, num_tokens))
        # The likelihood of a token is that of the answer after the one before it.
        predicted = slice(start, min(window.stop, num_tokens - 1))
        row: dict[str, object] = {"position": first_position + start, "tokens": (window.stop - start) * len(changes)}
        row |= mean_and_error("kl", [float(change.kl[window].mean()) for change in changes])
        if predicted.stop > start:
            row["nll"] = float(torch.stack([change.nll[predicted] for change in changes]).mean())
            row["dnll"] = float(torch.stack([change.nll_increase[predicted] for change in changes]).mean())
        row["top1"] = float(torch.stack([change.top1_equal[window] for change in changes]).float().mean())
        rows.append(row)
    return rows


def mean_and_error(name: str, samples: Sequence[float]) -> dict[str, object]:
    """Columns `name`, the mean of independent samples, and `name_se`, its standard error where there are several."""
    columns: dict[str, object] = {name: sum(samples) / len(samples)}
    if (error := standard_error(samples)) is not None:
        columns[f"{name}_se"] = error
    return columns


def standard_error(samples: Sequence[float]) -> float | None:
    """Standard error of the mean of independent samples; None when there are fewer than two."""
    if len(samples) < 2:
        return None
    return float(statistics.stdev(samples) / len(samples) ** 0.5)


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
