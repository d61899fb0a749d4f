"""`sglang-kvtc train-gates`: distil a model's gates from what it attends to when it repeats text."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.distill.distillation import Distillation, Distilled, distill, remove_activations, save_distilled
from sglang_kvtc.distill.plot import plot_losses
from sglang_kvtc.distill.teacher import Target
from sglang_kvtc.distill.train import Optimizer, TrainSettings
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import BiasForm, GateInput, GateKind

_DEFAULTS = Distillation(Path())
_TRAINING = TrainSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags and their defaults are those of `distill.distillation.Distillation` and `distill.train.TrainSettings`."""
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="Hugging Face model directory")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="gates to write (.safetensors)")
    parser.add_argument(
        "--data",
        nargs="+",
        default=list(_DEFAULTS.data),
        metavar="FILE",
        help="text to distil on: builtin (text that ships with Python), .txt, .jsonl, .parquet, directories",
    )
    parser.add_argument(
        "--tokens", type=int, default=_DEFAULTS.num_tokens, help="tokens to score (default %(default)s)"
    )
    parser.add_argument(
        "--longest", type=int, default=0, help="tokens of a long sequence (default: 100,000, or what the model holds)"
    )
    parser.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="of text and training (default %(default)s)")
    parser.add_argument("--dtype", default=_DEFAULTS.dtype, help="of the forward passes (default %(default)s)")
    parser.add_argument("--device", default=_DEFAULTS.device, help="torch device (default %(default)s)")
    parser.add_argument("--steps", type=int, default=_TRAINING.steps, help="training steps (default %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=_TRAINING.batch_tokens, help="tokens of a step (default %(default)s)"
    )
    parser.add_argument(
        "--optimizer", type=Optimizer, choices=list(Optimizer), default=_TRAINING.optimizer, help="(default adam)"
    )
    parser.add_argument("--learning-rate", type=float, help="before its steps (default: 0.003 for adam, 0.2 for sgd)")
    parser.add_argument(
        "--target-power",
        type=float,
        default=_TRAINING.target_power,
        help="targets are raised to it (default %(default)s); the paper's recipe is --optimizer sgd --target-power 1 "
        "--steps 5000",
    )
    parser.add_argument("--kind", type=GateKind, choices=list(GateKind), default=_DEFAULTS.kind, help="kind of gate")
    parser.add_argument(
        "--input", type=GateInput, choices=list(GateInput), default=_DEFAULTS.source, help="what gates are fed"
    )
    parser.add_argument(
        "--target", type=Target, choices=list(Target), default=_DEFAULTS.target, help="what gates are to predict"
    )
    parser.add_argument(
        "--gate-dim", type=int, default=_DEFAULTS.gate_dim, help="width of a gate (default %(default)s)"
    )
    parser.add_argument("--sinks", type=int, default=_DEFAULTS.num_sinks, help="learned sinks (default %(default)s)")
    parser.add_argument(
        "--bias-form", type=BiasForm, choices=list(BiasForm), default=_DEFAULTS.bias_form, help="how the bias is used"
    )
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="activations and checkpoint (default: beside --out, then removed)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="loss curves (default: beside --out, as .png)")


def run(args: argparse.Namespace) -> int:
    if args.out.suffix != ".safetensors":
        raise ConfigError(f"--out {args.out}: expected a file name that ends in .safetensors")
    settings = Distillation(
        args.model,
        data=tuple(args.data),
        num_tokens=args.tokens,
        longest=args.longest,
        seed=args.seed,
        dtype=args.dtype,
        device=args.device,
        kind=args.kind,
        source=args.input,
        target=args.target,
        gate_dim=args.gate_dim,
        num_sinks=args.sinks,
        bias_form=args.bias_form,
    )
    training = TrainSettings(
        args.steps, args.batch_tokens, args.optimizer, args.learning_rate, args.target_power, args.seed
    )
    work_dir = args.work_dir or args.out.with_suffix(".work")
    distilled = distill(settings, training, work_dir, TerminalProgress())
    save_distilled(distilled, settings, training, args.out)
    plot_losses(distilled.curves, args.plot or args.out.with_suffix(".png"))
    if args.work_dir is None:
        remove_activations(work_dir)
    print(_summary(distilled, args.out))
    return 0


def _summary(distilled: Distilled, path: Path) -> str:
    """Losses by layer and the cost of both halves."""
    curves = distilled.curves
    lines = ["layer  before   after   floor"]
    for layer, (before, after, floor) in enumerate(
        zip(curves.held_out[0], curves.held_out[-1], curves.floor, strict=True)
    ):
        lines.append(f"{layer:5d}  {before:6.4f}  {after:6.4f}  {floor:6.4f}")
    risen = sum(after >= before for before, after in zip(curves.held_out[0], curves.held_out[-1], strict=True))
    lines.append(
        f"held-out loss fell in {len(curves.floor) - risen} of {len(curves.floor)} layers; "
        f"{distilled.num_tokens:,} tokens: teacher {distilled.teacher_s:.0f} s, training {distilled.training_s:.0f} s"
    )
    lines.append(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return "\n".join(lines)
