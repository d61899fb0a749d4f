"""Which choices make good gates: the ablation tables of Fast KVzip (arXiv 2601.17668) on any causal model.

Figure 5 (target), 7 (input), 9 (architecture), 16 (size of the text), 17 (sinks and dimension) and 18 (window). Every
table varies one choice of the same base; its gates are trained once and stand in all tables. What is evicted is
evaluated as in `bench gates`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from sglang_kvtc.benchmarks.eviction_cases import (
    FULL,
    SINK_TOKENS,
    TEACHER,
    Case,
    Evictor,
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
from sglang_kvtc.calibrate.causal_lm import load_config, load_model, load_tokenizer
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.distill.distillation import Distillation, gate_config, score_text
from sglang_kvtc.distill.shards import ShardContent, ShardReader
from sglang_kvtc.distill.teacher import Target
from sglang_kvtc.distill.train import LossCurves, Optimizer, TrainSettings, train
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.budget import as_written
from sglang_kvtc.gates.model import BiasForm, GateInput, GateKind, Gates, new_gates

HELP = "loss, KL and retrieval of gates trained with other targets, inputs, architectures, sizes and texts"

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Variant:
    """Choices that take a training of their own; the defaults are the base. share: of the text, its beginning."""

    kind: GateKind = GateKind.SINK_ATTENTION
    source: GateInput = GateInput.HIDDEN
    target: Target = Target.RECONSTRUCTION
    gate_dim: int = 8
    num_sinks: int = 4
    bias_form: BiasForm = BiasForm.RELEASED
    optimizer: Optimizer = Optimizer.ADAM
    target_power: float = 0.5
    share: float = 1.0

    @property
    def name(self) -> str:
        """All choices; also fit for a file name."""
        return "-".join(str(choice) for choice in astuple(self))


BASE = Variant()
WINDOW = "window"
WINDOWS = (0, 20, 64, 128, 256)
TABLES: dict[str, dict[str, Variant]] = {
    "target": {target.value: Variant(target=target) for target in Target},
    "input": {source.value: Variant(source=source) for source in GateInput},
    "architecture": {
        "sink-attention": BASE,
        "no learned denominator": Variant(num_sinks=0),
        "mlp": Variant(kind=GateKind.MLP),
        "linear": Variant(kind=GateKind.LINEAR),
        "bias as printed": Variant(bias_form=BiasForm.PAPER),
    },
    "sinks": {str(sinks): Variant(num_sinks=sinks) for sinks in (2, 4, 8, 16)},
    "dimension": {str(dim): Variant(gate_dim=dim) for dim in (4, 8, 16, 32)},
    "recipe": {
        "adam on roots": BASE,
        "adam": Variant(target_power=1),
        "sgd on roots": Variant(optimizer=Optimizer.SGD),
        "sgd (the paper's)": Variant(optimizer=Optimizer.SGD, target_power=1),
    },
    WINDOW: {str(window): BASE for window in WINDOWS},
    "size": {"quarter": Variant(share=0.25), "half": Variant(share=0.5), "all": BASE},
}
REFERENCE = "reference"
"""Stands in the column `table` of the rows of teacher and full cache."""

# What is stored of the text: the base's needs, or everything of a kind.
_INPUTS = ((GateInput.HIDDEN,), tuple(GateInput))
_TARGETS = ((Target.RECONSTRUCTION,), tuple(Target))


@dataclass(frozen=True, slots=True)
class _Trained:
    gates: Gates
    curves: LossCurves
    num_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Less text and fewer steps than `train-gates` takes; sizes of the evaluation are those of `bench gates`."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model")
    parser.add_argument("--tables", type=_names, default=tuple(TABLES), help=f"of {','.join(TABLES)} (default: all)")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens to train on (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of each (default %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=1000, help="tokens of a step (default %(default)s)")
    parser.add_argument("--keep", type=float, default=0.3, help="share of pairs that stays (default %(default)s)")
    add_size_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of texts, training and contexts (default %(default)s)")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="kept and continued (default: a temporary folder)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw kl_over_teacher, as .png")


def run(args: argparse.Namespace) -> list[Row]:
    """Return a row per variant and table, then one for the teacher and one for the full cache.

    `kl_over_teacher` is against the one teacher, with --window, in every table. `held_out_loss` and `loss_floor` are
    means over layers in nats, of the variant's own target on tokens that are the same for all. A window has no numbers
    of a context where it takes more than --keep.

    All tables take an estimated hour and a half of two idle cores with the demo model, two thirds of it for the
    training of 20 variants, and 4 GB of disk in the temporary folder or --work-dir. What a named --work-dir holds is
    not done again; it is redone in full only when tables are added that need other inputs or targets.
    """
    if unknown := [name for name in args.tables if name not in TABLES]:
        raise ConfigError(f"--tables {','.join(unknown)}: expected some of {', '.join(TABLES)}")
    check_sizes(args)
    if args.plot is not None and (args.plot.suffix != ".png" or not args.plot.parent.is_dir()):
        raise ConfigError(f"--plot {args.plot}: expected a file name that ends in .png, in a folder that exists")
    variants = tuple(dict.fromkeys([BASE, *(variant for name in args.tables for variant in TABLES[name].values())]))
    training = TrainSettings(args.steps, args.batch_tokens, seed=args.seed)
    _check_batch(args, variants)
    model_dir = args.model or demo_model_dir(args.cache_dir)
    tokenizer = load_tokenizer(model_dir)
    # First, since what is wrong with them should be known before the training and not after it.
    sequences, tasks = held_out_texts(args, tokenizer)
    shortest = min(len(task.context_ids) for task in tasks)
    _check_windows(args, shortest)

    progress = TerminalProgress()
    settings = Distillation(model_dir, num_tokens=args.tokens, seed=args.seed)
    with _work_dir(args.work_dir) as work_dir:
        trained = _train_all(variants, settings, training, work_dir, progress)

    model = load_model(model_dir, "float32")
    scorers = {variant.name: gate_scorer(model, trained[variant].gates) for variant in variants}
    evictor = Evictor(model, {TEACHER: teacher_scorer(model, tokenizer), **scorers})
    windows = (args.window, args.retrieval_window)
    full, teacher = Case(FULL), Case(TEACHER, args.keep, *windows)
    by_variant = {variant: Case(variant.name, args.keep, *windows) for variant in variants}
    by_window = {window: Case(BASE.name, args.keep, window, window) for window in WINDOWS if WINDOW in args.tables}
    always = [full, teacher, *by_variant.values()]
    in_documents = [case for window, case in by_window.items() if _fits(window, args.keep, args.prefix_tokens)]
    in_retrieval = [case for window, case in by_window.items() if _fits(window, args.keep, shortest)]
    evaluate_documents(evictor, always + in_documents, sequences, args.prefix_tokens, progress)
    evaluate_retrieval(evictor, always + in_retrieval, tasks, progress)

    def columns(case: Case) -> Row:
        teacher_kl = None if case is full else mean_kl(teacher)
        return measures(case, tasks, teacher_kl=teacher_kl, full_correct=sum(full.correct))

    rows: list[Row] = []
    for table in args.tables:
        for label, variant in TABLES[table].items():
            case = by_window[int(label)] if table == WINDOW else by_variant[variant]
            rows.append(
                {"table": table, "variant": label, **_training_columns(trained[variant], args.steps), **columns(case)}
            )
    rows += [{"table": REFERENCE, "variant": case.method, **columns(case)} for case in (teacher, full)]
    if args.plot is not None:
        plot_ablations(rows, args.plot)
    return rows


def _train_all(
    variants: Sequence[Variant], settings: Distillation, training: TrainSettings, work_dir: Path, progress: Progress
) -> dict[Variant, _Trained]:
    """Score the text once, then train every variant on it."""
    folder, content = _activations(work_dir, variants)
    paths, num_tokens = score_text(settings, folder, progress, content)
    config = load_config(settings.model_dir)
    trained = {}
    for number, variant in enumerate(variants, start=1):
        own_tokens = int(num_tokens * variant.share)
        reader = ShardReader(paths, variant.source, variant.target, own_tokens)
        # Those of the whole text, so that losses of all sizes are on the same tokens; none is trained on in any.
        reader.held_out = ShardReader(paths, variant.source, variant.target).held_out
        own = Distillation(
            settings.model_dir,
            kind=variant.kind,
            source=variant.source,
            gate_dim=variant.gate_dim,
            num_sinks=variant.num_sinks,
            bias_form=variant.bias_form,
        )
        gates = new_gates(gate_config(own, config, reader.input_features), settings.seed)
        recipe = dataclasses.replace(training, optimizer=variant.optimizer, target_power=variant.target_power)
        checkpoint = folder / f"{variant.name}-{training.steps}-{training.batch_tokens}.safetensors"
        stages = _NumberedStages(progress, f"{number} of {len(variants)}")
        curves = train(gates, reader, recipe, stages, checkpoint=checkpoint)
        trained[variant] = _Trained(gates, curves, own_tokens)
    return trained


@dataclass(frozen=True, slots=True)
class _NumberedStages:
    """Progress that says which of several trainings it is about."""

    progress: Progress
    number: str

    def stage(self, name: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], object]]:
        return self.progress.stage(f"{name} {self.number}", total, unit)


def _activations(work_dir: Path, variants: Iterable[Variant]) -> tuple[Path, ShardContent]:
    """The folder of the activations and what it holds: one that is there and holds more than is needed will do.

    What is stored belongs to the identity of a folder of activations, so every content has a folder of its own; the
    checkpoints stand beside the activations they were trained on.
    """
    inputs, targets = {variant.source for variant in variants}, {variant.target for variant in variants}
    contents = [
        ShardContent(sources, scored)
        for sources in _INPUTS
        for scored in _TARGETS
        if inputs <= set(sources) and targets <= set(scored)
    ]
    folders = [(work_dir / "_".join("+".join(names) for names in astuple(content)), content) for content in contents]
    return next((pair for pair in folders if pair[0].is_dir()), folders[0])


@contextlib.contextmanager
def _work_dir(named: Path | None) -> Iterator[Path]:
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="kvtc-ablations-") as folder:
        yield Path(folder)


def _check_batch(args: argparse.Namespace, variants: Iterable[Variant]) -> None:
    share = min(variant.share for variant in variants)
    if (least := int(args.tokens * share * 0.99)) < args.batch_tokens:
        raise ConfigError(
            f"--tokens {args.tokens}: the smallest training has {least} of them, fewer than --batch-tokens "
            f"{args.batch_tokens}: ask for more, or leave out the table of sizes"
        )


def _check_windows(args: argparse.Namespace, shortest: int) -> None:
    if not 0 < args.keep < 1:
        raise ConfigError(f"--keep {args.keep}: expected a share between 0 and 1, neither included")
    for flag, window, num_tokens in (
        ("--window", args.window, args.prefix_tokens),
        ("--retrieval-window", args.retrieval_window, shortest),
    ):
        if not _fits(window, args.keep, num_tokens):
            raise ConfigError(
                f"{flag} {window}: with {SINK_TOKENS} sinks it is more than --keep {args.keep} of {num_tokens} tokens, "
                "so that nothing would be left to choose: make it smaller"
            )


def _fits(window: int, keep: float, num_tokens: int) -> bool:
    """Whether sinks and window are within the budget of a context."""
    return SINK_TOKENS + window <= as_written(keep) * num_tokens


def _training_columns(trained: _Trained, steps: int) -> Row:
    last, floor = trained.curves.held_out[-1], trained.curves.floor
    return {
        "steps": steps,
        "tokens": trained.num_tokens,
        "held_out_loss": sum(last) / len(last),
        "loss_floor": sum(floor) / len(floor),
    }


def plot_ablations(rows: Sequence[Row], path: Path) -> None:
    """Draw `kl_over_teacher` of every variant to `path`, a panel per table; 1 is the teacher."""
    # The canvas that needs no display, whatever the environment asks for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables: dict[object, dict[str, Any]] = {}
    for row in rows:
        if row["table"] != REFERENCE:
            bars = tables.setdefault(row["table"], {})
            if "kl_over_teacher" in row:
                bars[str(row["variant"])] = row["kl_over_teacher"]
    figure = Figure(figsize=(2.8 * len(tables), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for panel, (table, bars) in zip(panels, tables.items(), strict=True):
        panel.bar(list(bars), list(bars.values()))
        panel.axhline(1, color="black", linewidth=1, linestyle="--")
        panel.set_title(table)
        panel.tick_params(axis="x", rotation=90)
    panels[0].set_ylabel("KL over the teacher's")
    figure.savefig(path, dpi=120)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
