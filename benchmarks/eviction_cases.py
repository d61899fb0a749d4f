"""Cases of eviction, a method at one share each, and what a model loses in them: held-out documents and retrieval.

A document gives KL, NLL and top-1 of the text that follows its beginning; multi-query retrieval gives the answers that
survive. All in fp32 and on the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sglang_kvtc.benchmarks import presses
from sglang_kvtc.benchmarks.eviction import (
    Context,
    Respond,
    all_kept,
    continuation,
    kl_standard_error,
    prefill_context,
)
from sglang_kvtc.benchmarks.harness import Change, compare, first_sequences, log_probs, means, standard_error
from sglang_kvtc.benchmarks.outside import OutsidePresses
from sglang_kvtc.benchmarks.retrieval import RetrievalTask, count_correct, retrieval_tasks
from sglang_kvtc.calibrate.corpus import BUILTIN, TokenSequence, read_documents, split_documents
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ConfigError, KVTCError
from sglang_kvtc.eviction.budget import Budget, Scope
from sglang_kvtc.eviction.select import keep_mask
from sglang_kvtc.gates.model import GateInput, Gates
from sglang_kvtc.gates.score import GateScorer

TEACHER, FULL = "teacher", "full cache"
SINK_TOKENS = presses.SINK_TOKENS
MAX_OWN_ATTENTION_KL = 1e-5
"""Nats per token between the model's own attention and ours on the full cache: fp32 rounding stays well below."""

Scorer = Callable[[Context], torch.Tensor]
"""Scores of a context: f32[num_layers, num_tokens, num_kv_heads]; higher means keep."""


@dataclass(slots=True, eq=False)
class Case:
    """A method at one share, and what was found.

    keep: share of all (layer, token, KV head) pairs that stays, protected ones included; None for the full cache.
    scope: what competes for places. window, retrieval_window: last tokens protected in documents and in retrieval,
    beside the sinks; None protects neither. changes, kept_shares: one per document. correct: answers per context.
    """

    method: str
    keep: float | None = None
    window: int | None = None
    retrieval_window: int | None = None
    scope: Scope = Scope.GLOBAL
    changes: list[Change] = field(default_factory=list)
    kept_shares: list[float] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)

    def mask(self, scores: torch.Tensor, window: int | None) -> torch.Tensor:
        """The pairs that stay: bool[num_layers, num_tokens, num_kv_heads]."""
        budget = Budget(
            keep_fraction=self.keep,
            scope=self.scope,
            sink_tokens=0 if window is None else SINK_TOKENS,
            window_tokens=window or 0,
            min_tokens=0,
            allow_extreme=True,
        )
        return keep_mask(scores, budget)


@dataclass(frozen=True, slots=True)
class Evictor:
    """Evicts from one context after the other; every method scores a context once, for all of its cases."""

    model: Any
    scorers: dict[str, Scorer]
    outside: OutsidePresses | None = None

    def of(self, context: Context) -> Callable[[Case, int | None], tuple[Respond, float]]:
        """The function from a case and its window to what continues `context`, and the share of pairs that stayed."""
        scores: dict[str, torch.Tensor] = {}

        def evict(case: Case, window: int | None) -> tuple[Respond, float]:
            if self.outside and case.keep is not None and case.method in self.outside.names:
                return self.outside.evict(case.method, case.keep, context.token_ids), case.keep
            if case.keep is None:
                kept = all_kept(context)
            else:
                if case.method not in scores:
                    scores[case.method] = self.scorers[case.method](context)
                kept = case.mask(scores[case.method], window)
            return partial(continuation, self.model, context, kept), int(kept.sum()) / kept.numel()

        return evict


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes default to those of the measured reference (six documents, 1,024 + 192 tokens; 20 contexts, 5 keys)."""
    parser.add_argument("--documents", type=int, default=6, help="held-out documents (default %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="evicted context (default %(default)s)")
    parser.add_argument("--suffix-tokens", type=int, default=192, help="tokens scored after it (default %(default)s)")
    parser.add_argument("--contexts", type=int, default=20, help="retrieval contexts (default %(default)s)")
    parser.add_argument("--window", type=int, default=128, help="last tokens kept of documents (default %(default)s)")
    parser.add_argument("--retrieval-window", type=int, default=8, help="and of retrieval (default %(default)s)")


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ConfigError for sizes of `add_size_arguments` with which there is nothing to measure."""
    smallest = {"documents": 1, "contexts": 1, "prefix_tokens": 1, "suffix_tokens": 2}
    smallest |= {"window": 0, "retrieval_window": 0}
    for name, least in smallest.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {least}")


def held_out_texts(args: argparse.Namespace, tokenizer: Any) -> tuple[list[TokenSequence], list[RetrievalTask]]:
    """The documents and retrieval tasks that the sizes and `args.seed` ask for."""
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    num_tokens = args.prefix_tokens + args.suffix_tokens
    sequences = first_sequences(held_out, tokenizer, args.documents, num_tokens, args.seed)
    return sequences, retrieval_tasks(tokenizer, args.contexts, args.seed)


def evaluate_documents(
    evictor: Evictor, cases: Sequence[Case], sequences: Sequence[TokenSequence], prefix_tokens: int, progress: Progress
) -> None:
    """Evict from the first `prefix_tokens` of every sequence and score the rest; every case gets a change of each.

    Raises KVTCError when our attention differs from the model's own where nothing is evicted.
    """
    with progress.stage("held-out documents", len(cases) * len(sequences), "evaluations") as advance:
        for sequence in sequences:
            _read_on(evictor, cases, sequence, prefix_tokens, advance)


def evaluate_retrieval(
    evictor: Evictor, cases: Sequence[Case], tasks: Sequence[RetrievalTask], progress: Progress
) -> None:
    """Evict from the context of every task and ask its questions; every case gets a number of answers of each."""
    with progress.stage("retrieval", len(cases) * len(tasks), "evaluations") as advance:
        for task in tasks:
            evict = evictor.of(prefill_context(evictor.model, task.context_ids))
            for case in cases:
                respond, _ = evict(case, case.retrieval_window)
                case.correct.append(count_correct(respond, task))
                advance(1)


def _read_on(
    evictor: Evictor,
    cases: Sequence[Case],
    sequence: TokenSequence,
    prefix_tokens: int,
    advance: Callable[[int], object],
) -> None:
    """Evaluate every case on the suffix of one document."""
    suffix = sequence.token_ids[prefix_tokens:]
    context = prefill_context(evictor.model, sequence.token_ids[:prefix_tokens])
    reference = continuation(evictor.model, context, all_kept(context), suffix)
    own = compare(log_probs(evictor.model, context.keys, context.values, suffix), reference, suffix)
    if not own.kl <= MAX_OWN_ATTENTION_KL * own.num_tokens:
        raise KVTCError(
            f"on the full cache of {sequence.name} our attention and the model's own differ by a KL of "
            f"{own.kl / own.num_tokens:.3g} nats per token, expected at most {MAX_OWN_ATTENTION_KL:g}"
        )
    evict = evictor.of(context)
    for case in cases:
        respond, share = evict(case, case.window)
        case.changes.append(compare(reference, respond(suffix), suffix))
        case.kept_shares.append(share)
        advance(1)


def mean_kl(case: Case) -> float:
    """KL divergence from the full cache in nats per token of all documents."""
    return means(case.changes)["kl"]


def measures(
    case: Case, tasks: Sequence[RetrievalTask], *, teacher_kl: float | None, full_correct: int
) -> dict[str, object]:
    """The columns of a case; what it was not evaluated on, or has no reference for, is left out.

    teacher_kl: `mean_kl` of the teacher's case to compare with. full_correct: answers on the full cache.
    """
    columns: dict[str, object] = {
        "keep": 1.0 if case.keep is None else case.keep,
        "kept": sum(case.kept_shares) / len(case.kept_shares) if case.kept_shares else None,
        "window": case.window,
        "retrieval_window": case.retrieval_window,
    }
    if case.changes:
        columns |= {
            "kl": mean_kl(case),
            "kl_se": kl_standard_error(case.changes),
            **means(case.changes),
            "kl_over_teacher": mean_kl(case) / teacher_kl if teacher_kl else None,
        }
    if case.correct:
        correct, num_questions = sum(case.correct), sum(len(task.questions) for task in tasks)
        columns |= {
            "retrieval_correct": correct,
            "retrieval_total": num_questions,
            "retrieval_se": standard_error([count * len(case.correct) / num_questions for count in case.correct]),
            "retrieval_over_full": correct / full_correct if full_correct else None,
        }
    return {name: value for name, value in columns.items() if value is not None}


def teacher_scorer(model: Any, tokenizer: Any) -> Scorer:
    """KVzip itself, which gates are trained to predict."""

    def score(context: Context) -> torch.Tensor:
        from sglang_kvtc.distill.teacher import reconstruction_scores

        return reconstruction_scores(model, tokenizer, context.token_ids)

    return score


def gate_scorer(model: Any, gates: Gates) -> Scorer:
    """Gates in fp32, fed what they were trained on."""

    def score(context: Context) -> torch.Tensor:
        match gates.config.input:
            case GateInput.HIDDEN:
                inputs = context.hidden
            case GateInput.KEYS:
                inputs = context.keys.flatten(2)
            case GateInput.KEYS_BEFORE_ROPE:
                rope = rope_spec_from_config(model.config.get_text_config(decoder=True).to_dict())
                inputs = presses.keys_before_rope(context, rope).flatten(2)
        return GateScorer(gates, torch.float32).score_layers(inputs)

    return score
