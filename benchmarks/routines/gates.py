"""What a model loses when KV pairs are evicted by gates, by their teacher, and by published methods.

Six held-out documents give KL, NLL and top-1 of the text that follows; multi-query retrieval gives the answers that
survive. All in fp32, on the same tokens. `keep` is the share of all (layer, token, KV head) pairs that stays, protected
ones included; sinks and window protect in gates, teacher and random alone, the others protect what their authors do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.benchmarks import presses
from sglang_kvtc.benchmarks.eviction import (
    Context,
    Respond,
    all_kept,
    continuation,
    kl_standard_error,
    prefill_context,
    standard_error,
)
from sglang_kvtc.benchmarks.harness import Change, compare, first_sequences, log_probs, means
from sglang_kvtc.benchmarks.outside import OutsidePresses
from sglang_kvtc.benchmarks.retrieval import count_correct, retrieval_tasks
from sglang_kvtc.calibrate.causal_lm import load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.corpus import BUILTIN, TokenSequence, read_documents, split_documents
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ConfigError, KVTCError
from sglang_kvtc.eviction.budget import Budget, Scope
from sglang_kvtc.eviction.select import keep_mask
from sglang_kvtc.gates.io import check_gates_fit, load_gates
from sglang_kvtc.gates.model import GateInput, Gates, GateShape
from sglang_kvtc.gates.score import GateScorer

HELP = "KL, NLL, top-1 and retrieval of a model whose KV pairs were evicted by gates and by other methods"

TEACHER, GATES, FULL = "teacher", "gates", "full cache"
SCOPES = {
    TEACHER: Scope.GLOBAL,
    GATES: Scope.GLOBAL,
    "snapkv": Scope.HEAD,
    "streaming-llm": Scope.HEAD,
    "expected-attention": Scope.LAYER,
    "key-difference": Scope.HEAD,
    "key-norm": Scope.HEAD,
    "random": Scope.GLOBAL,
}
"""The methods, and what competes for places in each by its authors' design (expected attention: with Ada-KV)."""
PROTECTED = (TEACHER, GATES, "random")
"""Methods that need sinks and window protected; the scores of the others see to what they protect."""
OTHER_WINDOWS = (0, 20)
"""Windows for which gates and teacher have rows too."""
SINK_TOKENS = presses.SINK_TOKENS
MAX_OWN_ATTENTION_KL = 1e-5
"""Nats per token between the model's own attention and ours on the full cache: fp32 rounding stays well below."""

Scorer = Callable[[Context], torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes default to those of the measured reference (six documents, 1,024 + 192 tokens; 20 contexts, 5 keys)."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--gates", type=Path, help="gate file (default: the demo gates, trained on first use)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model and gates")
    parser.add_argument("--methods", type=_names, default=tuple(SCOPES), help=f"of {','.join(SCOPES)} (default: all)")
    parser.add_argument("--keep", type=_shares, default=(0.5, 0.3, 0.2), help="shares that stay (default 0.5,0.3,0.2)")
    parser.add_argument("--documents", type=int, default=6, help="held-out documents (default %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="evicted context (default %(default)s)")
    parser.add_argument("--suffix-tokens", type=int, default=192, help="tokens scored after it (default %(default)s)")
    parser.add_argument("--contexts", type=int, default=20, help="retrieval contexts (default %(default)s)")
    parser.add_argument("--window", type=int, default=128, help="last tokens kept of documents (default %(default)s)")
    parser.add_argument("--retrieval-window", type=int, default=8, help="and of retrieval (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="order, contexts and random scores (default %(default)s)")
    parser.add_argument("--kvpress", action="store_true", help="also run kvpress's own presses on the same tokens")


@dataclass(slots=True, eq=False)
class _Case:
    """One row: a method at one share, and what was found. A `keep` of None is the full cache."""

    method: str
    keep: float | None = None
    window: int | None = None
    retrieval_window: int | None = None
    changes: list[Change] = field(default_factory=list)
    kept_shares: list[float] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)

    def mask(self, scores: torch.Tensor, window: int | None) -> torch.Tensor:
        """The pairs that stay: bool[num_layers, num_tokens, num_kv_heads]."""
        budget = Budget(
            keep_fraction=self.keep,
            scope=SCOPES[self.method],
            sink_tokens=0 if window is None else SINK_TOKENS,
            window_tokens=window or 0,
            min_tokens=0,
            allow_extreme=True,
        )
        return keep_mask(scores, budget)


@dataclass(frozen=True, slots=True)
class _Evictor:
    """Evicts from one context after the other; every method scores a context once, for all of its cases."""

    model: Any
    scorers: dict[str, Scorer]
    outside: OutsidePresses | None

    def of(self, context: Context) -> Callable[[_Case, int | None], tuple[Respond, float]]:
        """The function from a case and its window to what continues `context`, and the share of pairs that stayed."""
        scores: dict[str, torch.Tensor] = {}

        def evict(case: _Case, window: int | None) -> tuple[Respond, float]:
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


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per method, share and window; twenty minutes on two cores once the gates exist."""
    if unknown := [name for name in args.methods if name not in SCOPES]:
        raise ConfigError(f"--methods {','.join(unknown)}: expected some of {', '.join(SCOPES)}")
    for name, least in (("documents", 1), ("contexts", 1), ("prefix_tokens", 1), ("suffix_tokens", 2)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {least}")
    model_dir = args.model or demo_model_dir(args.cache_dir)
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, "float32")
    progress = TerminalProgress()
    gates = _gates(args, model_dir, model, progress) if GATES in args.methods or args.kvpress else None
    outside = OutsidePresses(model, gates) if args.kvpress and gates is not None else None
    evictor = _Evictor(model, _scorers(model, tokenizer, gates, args.seed), outside)
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    num_tokens = args.prefix_tokens + args.suffix_tokens
    sequences = first_sequences(held_out, tokenizer, args.documents, num_tokens, args.seed)
    tasks = retrieval_tasks(tokenizer, args.contexts, args.seed)
    cases = _cases(args, outside)
    with progress.stage("held-out documents", len(cases) * len(sequences), "evaluations") as advance:
        for sequence in sequences:
            _read_on(evictor, cases, sequence, args.prefix_tokens, advance)
    with progress.stage("retrieval", len(cases) * len(tasks), "evaluations") as advance:
        for task in tasks:
            evict = evictor.of(prefill_context(model, task.context_ids))
            for case in cases:
                respond, _ = evict(case, case.retrieval_window)
                case.correct.append(count_correct(respond, task))
                advance(1)
    return _rows(cases, args.window, sum(len(task.questions) for task in tasks))


def _read_on(
    evictor: _Evictor,
    cases: Sequence[_Case],
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


def _cases(args: argparse.Namespace, outside: OutsidePresses | None) -> list[_Case]:
    cases = []
    for name in args.methods:
        windows = [(args.window, args.retrieval_window)] if name in PROTECTED else [(None, None)]
        if name in (GATES, TEACHER):
            windows += [(window, window) for window in OTHER_WINDOWS]
        cases += [_Case(name, keep, *pair) for pair in dict.fromkeys(windows) for keep in args.keep]
    cases += [_Case(name, keep) for name in (outside.names if outside else ()) for keep in args.keep]
    return [*cases, _Case(FULL)]


def _rows(cases: Sequence[_Case], window: int, num_questions: int) -> list[dict[str, object]]:
    """One row per case; numbers that a case does not have are left out."""
    found = {case: means(case.changes)["kl"] for case in cases}
    of_teacher = {(case.keep, case.window): kl for case, kl in found.items() if case.method == TEACHER}
    full = sum(next(case.correct for case in cases if case.method == FULL))
    rows = []
    for case, kl in found.items():
        # Methods that have no window are compared with the teacher at its own.
        teacher = of_teacher.get((case.keep, case.window), of_teacher.get((case.keep, window)))
        correct = sum(case.correct)
        columns: dict[str, object] = {
            "method": case.method,
            "keep": 1.0 if case.keep is None else case.keep,
            "kept": sum(case.kept_shares) / len(case.kept_shares),
            "window": case.window,
            "retrieval_window": case.retrieval_window,
            "kl": kl,
            "kl_se": kl_standard_error(case.changes),
            **means(case.changes),
            "kl_over_teacher": kl / teacher if teacher else None,
            "retrieval_correct": correct,
            "retrieval_total": num_questions,
            "retrieval_se": standard_error([count * len(case.correct) / num_questions for count in case.correct]),
            "retrieval_over_full": correct / full if full else None,
        }
        rows.append({name: value for name, value in columns.items() if value is not None})
    return rows


def _gates(args: argparse.Namespace, model_dir: Path, model: Any, progress: TerminalProgress) -> Gates:
    """The gates named or made, if they are for this model."""
    path = args.gates
    if path is None:
        if args.model is not None:
            raise ConfigError("--gates: --model needs gates of its own: name their file or leave them out of --methods")
        from sglang_kvtc.distill.demo_gates import demo_gates

        path = demo_gates(progress, args.cache_dir)
    file = load_gates(path)
    geometry = model_geometry(model.config.get_text_config(decoder=True))
    is_hidden = file.gates.config.input is GateInput.HIDDEN
    decoder = model.config.get_text_config(decoder=True)
    shape = GateShape(
        num_layers=geometry.num_layers,
        input_features=decoder.hidden_size if is_hidden else geometry.num_kv_heads * geometry.head_dim,
        num_kv_heads=geometry.num_kv_heads,
        group_size=decoder.num_attention_heads // geometry.num_kv_heads,
    )
    check_gates_fit(file, shape, fingerprint_model(model_dir))
    return file.gates


def _scorers(model: Any, tokenizer: Any, gates: Gates | None, seed: int) -> dict[str, Scorer]:
    """The scoring function of every method."""

    def teacher(context: Context) -> torch.Tensor:
        from sglang_kvtc.distill.teacher import reconstruction_scores

        return reconstruction_scores(model, tokenizer, context.token_ids)

    def rope() -> RopeSpec:
        return rope_spec_from_config(model.config.get_text_config(decoder=True).to_dict())

    def by_gates(context: Context) -> torch.Tensor:
        assert gates is not None
        match gates.config.input:
            case GateInput.HIDDEN:
                inputs = context.hidden
            case GateInput.KEYS:
                inputs = context.keys.flatten(2)
            case GateInput.KEYS_BEFORE_ROPE:
                inputs = presses.keys_before_rope(context, rope()).flatten(2)
        return GateScorer(gates, torch.float32).score_layers(inputs)

    return {
        TEACHER: teacher,
        GATES: by_gates,
        "snapkv": presses.snapkv,
        "streaming-llm": presses.streaming_llm,
        "expected-attention": lambda context: presses.expected_attention(context, rope()),
        "key-difference": presses.key_difference,
        "key-norm": presses.key_norm,
        "random": lambda context: presses.random_scores(context, seed),
    }


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))
