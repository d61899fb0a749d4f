"""What a model loses when KV pairs are evicted by gates, by their teacher, and by published methods.

`keep` is the share of all (layer, token, KV head) pairs that stays, protected ones included; sinks and window protect
in gates, teacher and random alone, the others protect what their authors do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.benchmarks import presses
from sglang_kvtc.benchmarks.eviction_cases import (
    FULL,
    TEACHER,
    Case,
    Evictor,
    Scorer,
    add_size_arguments,
    check_sizes,
    evaluate_documents,
    evaluate_retrieval,
    gate_scorer,
    held_out_texts,
    mean_kl,
    measures,
    teacher_scorer,
)
from sglang_kvtc.benchmarks.outside import OutsidePresses
from sglang_kvtc.benchmarks.retrieval import RetrievalTask
from sglang_kvtc.calibrate.causal_lm import load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.budget import Scope
from sglang_kvtc.gates.io import check_gates_fit, load_gates
from sglang_kvtc.gates.model import GateInput, Gates, GateShape

HELP = "KL, NLL, top-1 and retrieval of a model whose KV pairs were evicted by gates and by other methods"

GATES = "gates"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, gates, methods and shares; the sizes are those of `add_size_arguments`."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--gates", type=Path, help="gate file (default: the demo gates, trained on first use)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model and gates")
    parser.add_argument("--methods", type=_names, default=tuple(SCOPES), help=f"of {','.join(SCOPES)} (default: all)")
    parser.add_argument("--keep", type=_shares, default=(0.5, 0.3, 0.2), help="shares that stay (default 0.5,0.3,0.2)")
    add_size_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="order, contexts and random scores (default %(default)s)")
    parser.add_argument("--kvpress", action="store_true", help="also run kvpress's own presses on the same tokens")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per method, share and window; twenty minutes on two cores once the gates exist."""
    if unknown := [name for name in args.methods if name not in SCOPES]:
        raise ConfigError(f"--methods {','.join(unknown)}: expected some of {', '.join(SCOPES)}")
    check_sizes(args)
    model_dir = args.model or demo_model_dir(args.cache_dir)
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, "float32")
    progress = TerminalProgress()
    gates = _gates(args, model_dir, model, progress) if GATES in args.methods or args.kvpress else None
    outside = OutsidePresses(model, gates) if args.kvpress and gates is not None else None
    evictor = Evictor(model, _scorers(model, tokenizer, gates, args.seed), outside)
    sequences, tasks = held_out_texts(args, tokenizer)
    cases = _cases(args, outside)
    evaluate_documents(evictor, cases, sequences, args.prefix_tokens, progress)
    evaluate_retrieval(evictor, cases, tasks, progress)
    return _rows(cases, args.window, tasks)


def _cases(args: argparse.Namespace, outside: OutsidePresses | None) -> list[Case]:
    cases = []
    for name in args.methods:
        windows = [(args.window, args.retrieval_window)] if name in PROTECTED else [(None, None)]
        if name in (GATES, TEACHER):
            windows += [(window, window) for window in OTHER_WINDOWS]
        cases += [Case(name, keep, *pair, SCOPES[name]) for pair in dict.fromkeys(windows) for keep in args.keep]
    cases += [Case(name, keep) for name in (outside.names if outside else ()) for keep in args.keep]
    return [*cases, Case(FULL)]


def _rows(cases: Sequence[Case], window: int, tasks: Sequence[RetrievalTask]) -> list[dict[str, object]]:
    """One row per case; numbers that a case does not have are left out."""
    of_teacher = {(case.keep, case.window): mean_kl(case) for case in cases if case.method == TEACHER}
    full = sum(next(case.correct for case in cases if case.method == FULL))
    rows = []
    for case in cases:
        # Methods that have no window are compared with the teacher at its own.
        teacher = of_teacher.get((case.keep, case.window), of_teacher.get((case.keep, window)))
        rows.append({"method": case.method, **measures(case, tasks, teacher_kl=teacher, full_correct=full)})
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

    def rope() -> RopeSpec:
        return rope_spec_from_config(model.config.get_text_config(decoder=True).to_dict())

    return {
        TEACHER: teacher_scorer(model, tokenizer),
        **({GATES: gate_scorer(model, gates)} if gates is not None else {}),
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
