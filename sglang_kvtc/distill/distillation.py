"""The whole distillation: text and a model in, trained gates out."""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_kvtc import __version__
from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_config, load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.corpus import BUILTIN, read_documents, split_documents
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.codec import compute_dtype
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.distill.shards import ShardContent, ShardReader, write_shards
from sglang_kvtc.distill.teacher import Target
from sglang_kvtc.distill.text import distillation_sequences, long_tokens
from sglang_kvtc.distill.train import LossCurves, TrainSettings, train
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.io import save_gates
from sglang_kvtc.gates.model import BiasForm, GateConfig, GateInput, GateKind, Gates, new_gates

logger = logging.getLogger(__name__)

_CHARACTERS_READ_PER_TOKEN = 16
_SETTINGS_FILE = "settings.json"


@dataclass(frozen=True, slots=True)
class Distillation:
    """What `sglang-kvtc train-gates` was asked to do.

    data: `builtin`, files and directories. longest: tokens of a long sequence, 0 for what suits the model. dtype: of
    the forward passes, `auto` for what this machine multiplies fastest.
    """

    model_dir: Path
    data: tuple[str, ...] = (BUILTIN,)
    num_tokens: int = 160_000
    longest: int = 0
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    kind: GateKind = GateKind.SINK_ATTENTION
    source: GateInput = GateInput.HIDDEN
    target: Target = Target.RECONSTRUCTION
    gate_dim: int = 8
    num_sinks: int = 4
    bias_form: BiasForm = BiasForm.RELEASED

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: expected auto or one of {', '.join(DTYPES)}")
        for flag, value, smallest in (("--tokens", self.num_tokens, 1), ("--longest", self.longest, 0)):
            if value < smallest:
                raise ConfigError(f"{flag} {value}: expected at least {smallest}")


@dataclass(frozen=True, slots=True)
class Distilled:
    """Trained gates and what they cost. teacher_s covers the forward passes, too."""

    gates: Gates
    curves: LossCurves
    num_tokens: int
    teacher_s: float
    training_s: float


def distill(
    settings: Distillation,
    training: TrainSettings,
    work_dir: Path,
    progress: Progress,
    content: ShardContent | None = None,
) -> Distilled:
    """Score text with the teacher, then train gates on it. Continues what an interrupted run left in `work_dir`.

    content: what to store, by default only what this training needs. Raises ConfigError when `work_dir` holds the
    activations of another model or text.
    """
    started = time.monotonic()
    paths, num_tokens = score_text(settings, work_dir, progress, content)
    scored = time.monotonic()
    config = load_config(settings.model_dir)
    reader = ShardReader(paths, settings.source, settings.target)
    gates = new_gates(gate_config(settings, config, reader.input_features), settings.seed)
    curves = train(
        gates, reader, training, progress, device=settings.device, checkpoint=work_dir / "training.safetensors"
    )
    return Distilled(gates, curves, num_tokens, scored - started, time.monotonic() - scored)


def score_text(
    settings: Distillation, work_dir: Path, progress: Progress, content: ShardContent | None = None
) -> tuple[list[Path], int]:
    """Write the shards of the text; returns their paths and the number of tokens."""
    config = load_config(settings.model_dir)
    geometry, rope = model_geometry(config), rope_spec_from_config(config.to_dict())
    content = content or ShardContent((settings.source,), (settings.target,))
    tokenizer = load_tokenizer(settings.model_dir)
    documents, _ = split_documents(
        read_documents(settings.data, tokenizer, settings.num_tokens * _CHARACTERS_READ_PER_TOKEN)
    )
    sequences = distillation_sequences(
        documents,
        tokenizer,
        num_tokens=settings.num_tokens,
        longest=settings.longest or long_tokens(config.max_position_embeddings),
        seed=settings.seed,
    )
    _claim(work_dir, settings, content)
    model = load_model(settings.model_dir, _dtype(settings, geometry.dtype), settings.device)
    paths = write_shards(model, tokenizer, sequences, work_dir, content, rope, geometry, progress)
    return paths, sum(len(sequence.token_ids) for sequence in sequences)


def gate_config(settings: Distillation, config: Any, input_features: int) -> GateConfig:
    """Configuration of the gates for a model's configuration."""
    geometry = model_geometry(config)
    return GateConfig(
        kind=settings.kind,
        input=settings.source,
        num_layers=geometry.num_layers,
        input_features=input_features,
        num_kv_heads=geometry.num_kv_heads,
        group_size=config.num_attention_heads // geometry.num_kv_heads,
        gate_dim=settings.gate_dim,
        num_sinks=settings.num_sinks,
        bias_form=settings.bias_form,
    )


def save_distilled(distilled: Distilled, settings: Distillation, training: TrainSettings, path: Path) -> None:
    """Write the gates with what they came from: settings, cost, and losses by layer before and after."""
    curves = distilled.curves
    save_gates(
        path,
        distilled.gates,
        fingerprint_model(settings.model_dir),
        {
            "version": __version__,
            "corpus": " ".join(settings.data),
            "tokens": str(distilled.num_tokens),
            "seed": str(settings.seed),
            "target": settings.target.value,
            "training": json.dumps(asdict(training)),
            "teacher_s": f"{distilled.teacher_s:.1f}",
            "training_s": f"{distilled.training_s:.1f}",
            "held_out_loss": json.dumps(
                {"first": curves.held_out[0], "last": curves.held_out[-1], "floor": curves.floor}
            ),
        },
    )


def remove_activations(work_dir: Path) -> None:
    """Delete what `distill` wrote into `work_dir`, and the folder if nothing else is in it."""
    for path in (
        *work_dir.glob("sequence-*.safetensors"),
        work_dir / "training.safetensors",
        work_dir / _SETTINGS_FILE,
    ):
        path.unlink(missing_ok=True)
    if not any(work_dir.iterdir()):
        shutil.rmtree(work_dir)


def _claim(work_dir: Path, settings: Distillation, content: ShardContent) -> None:
    """Note in `work_dir` what its shards hold, or check that it is the same."""
    deciding = ("data", "num_tokens", "longest", "seed", "dtype")
    key = {name: value for name, value in asdict(settings).items() if name in deciding}
    key |= {"model": fingerprint_model(settings.model_dir).digest, "version": __version__, **asdict(content)}
    text = json.dumps(key, sort_keys=True)
    file = work_dir / _SETTINGS_FILE
    if file.exists():
        if file.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{work_dir} holds the activations of another run: remove it, or name another --work-dir")
        logger.info("continuing what is in %s", work_dir)
        return
    work_dir.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _dtype(settings: Distillation, model_dtype: str) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    if torch.device(settings.device).type == "cpu":
        return str(compute_dtype(CodecConfig(), DTYPES[model_dtype])).removeprefix("torch.")
    return model_dtype
