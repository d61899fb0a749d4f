"""Training gates on stored activations (Fast KVzip section 3.3 and appendix A): the cross-entropy of each layer.

The paper's recipe is SGD on the teacher's probabilities. Most of them are tiny, and their cross-entropy hardly tells
0.01 from 0.001, although half of all pairs are ranked by that. Gates are trained on their square roots here, which
order pairs alike and are further apart, and with Adam: after 400 steps the KL of evicting half was a third of that of
the paper's recipe (`sglang-kvtc bench gate-ablations --tables recipe`).
"""

from __future__ import annotations

import enum
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_kvtc.artifact.container import replace_file
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.distill.shards import ShardReader
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import Gates

_HELD_OUT_BATCH = 2000
_POINTS = 20
"""Times that the held-out loss is measured on the way."""


class Optimizer(enum.StrEnum):
    """What follows the gradient."""

    ADAM = "adam"
    SGD = "sgd"


LEARNING_RATES = {Optimizer.ADAM: 3e-3, Optimizer.SGD: 0.2}
"""Before the steps of `learning_rate_factor`. That of SGD is the paper's."""
_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How gates are trained. The paper's recipe is `TrainSettings(5000, optimizer=Optimizer.SGD, target_power=1)`.

    learning_rate: None for that of LEARNING_RATES. target_power: targets are raised to it. Any power orders pairs
    alike; those below 1 spread the small ones.
    """

    steps: int = 1000
    batch_tokens: int = 1000
    optimizer: Optimizer = Optimizer.ADAM
    learning_rate: float | None = None
    target_power: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "learning_rate", "target_power"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: expected a number above 0")

    def new_optimizer(self, gates: Gates) -> torch.optim.Optimizer:
        rate = self.peak_learning_rate
        if self.optimizer is Optimizer.SGD:
            return torch.optim.SGD(gates.parameters(), lr=rate, momentum=_MOMENTUM)
        return torch.optim.Adam(gates.parameters(), lr=rate)

    @property
    def peak_learning_rate(self) -> float:
        return LEARNING_RATES[self.optimizer] if self.learning_rate is None else self.learning_rate


@dataclass(slots=True)
class LossCurves:
    """Losses in nats by layer. Row i of `training` (mean since the row before) and `held_out` is after `steps[i]`.

    Losses are those of the targets that were trained on, which depend on `target_power`. floor: entropy of the held-out
    targets, which no prediction can beat.
    """

    floor: list[float]
    steps: list[int] = field(default_factory=list)
    training: list[list[float]] = field(default_factory=list)
    held_out: list[list[float]] = field(default_factory=list)


def learning_rate_factor(step: int, steps: int) -> float:
    """Factor of the learning rate: warm-up over 1% of the steps, then 1, from half on 0.5, the last quarter 0.25."""
    warm_up = max(1, steps // 100)
    if step < warm_up:
        return (step + 1) / warm_up
    return 1.0 if step < steps / 2 else 0.5 if step < steps * 3 / 4 else 0.25


def layer_losses(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy f32[num_layers] of f32[num_layers, n, num_kv_heads], with soft targets in [0, 1]."""
    return F.binary_cross_entropy(scores, targets, reduction="none").mean(dim=(1, 2))


def train(
    gates: Gates,
    reader: ShardReader,
    settings: TrainSettings,
    progress: Progress,
    *,
    device: str = "cpu",
    checkpoint: Path | None = None,
) -> LossCurves:
    """Train `gates` in place; returns the loss curves.

    checkpoint: file that is written at every point of the curves and continued from when it is there; the result is the
    same as without the interruption. Raises ConfigError when it belongs to other settings or other gates, or when there
    is less than one batch of tokens.
    """
    batch = settings.batch_tokens
    if len(reader.training) < batch or not len(reader.held_out):
        raise ConfigError(
            f"{len(reader.training):,} tokens are fewer than one batch of {batch:,}: ask for more --tokens"
        )
    gates.to(device).train()
    optimizer = settings.new_optimizer(gates)

    def held_out(gates: Gates | None) -> list[float]:
        return _held_out(reader, gates, settings.target_power, device)

    curves = LossCurves(floor=held_out(None))
    first = _resume(checkpoint, gates, optimizer, curves, settings) if checkpoint else 0
    if first == 0:
        _record(curves, 0, [], held_out(gates))
    recent: list[torch.Tensor] = []
    order = _BatchOrder(reader.training, batch, settings.seed)
    with (
        progress.stage("training", settings.steps - first, "steps") as advance,
        ThreadPoolExecutor(1, thread_name_prefix="kvtc-batches") as reading,
    ):
        pending = reading.submit(reader.read, order.batch(first))
        for step in range(first, settings.steps):
            inputs, targets = (part.to(device) for part in pending.result())
            pending = reading.submit(reader.read, order.batch(step + 1))
            for group in optimizer.param_groups:
                group["lr"] = settings.peak_learning_rate * learning_rate_factor(step, settings.steps)
            losses = layer_losses(gates(inputs), targets.pow_(settings.target_power))
            optimizer.zero_grad()
            # Layers share nothing, so the sum trains each as if it were alone.
            losses.sum().backward()
            optimizer.step()
            recent.append(losses.detach())
            advance(1)
            done = step + 1
            if done % max(1, settings.steps // _POINTS) == 0 or done == settings.steps:
                _record(curves, done, torch.stack(recent).mean(dim=0).tolist(), held_out(gates))
                recent = []
                if checkpoint:
                    _save(checkpoint, gates, optimizer, curves, settings)
    gates.eval().cpu()
    return curves


class _BatchOrder:
    """Every token once per epoch, in an order drawn from the seed; what does not fill a batch is left out."""

    def __init__(self, tokens: torch.Tensor, batch_tokens: int, seed: int) -> None:
        self._tokens, self._batch_tokens, self._seed = tokens, batch_tokens, seed
        self._epoch, self._permutation = -1, tokens

    def batch(self, step: int) -> torch.Tensor:
        epoch, index = divmod(step, len(self._tokens) // self._batch_tokens)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._permutation = self._tokens[torch.randperm(len(self._tokens), generator=generator)]
            self._epoch = epoch
        return self._permutation[index * self._batch_tokens : (index + 1) * self._batch_tokens]


def _held_out(reader: ShardReader, gates: Gates | None, target_power: float, device: str) -> list[float]:
    """Held-out loss by layer; with no gates, that of the targets themselves."""
    total: torch.Tensor | None = None
    with torch.no_grad():
        for tokens in reader.held_out.split(_HELD_OUT_BATCH):
            inputs, targets = (part.to(device) for part in reader.read(tokens))
            targets.pow_(target_power)
            losses = layer_losses(targets if gates is None else gates(inputs), targets) * len(tokens)
            total = losses if total is None else total + losses
    assert total is not None
    return [float(loss) / len(reader.held_out) for loss in total]


def _record(curves: LossCurves, step: int, training: list[float], held_out: list[float]) -> None:
    curves.steps.append(step)
    curves.training.append(training)
    curves.held_out.append(held_out)


def _save(
    path: Path, gates: Gates, optimizer: torch.optim.Optimizer, curves: LossCurves, settings: TrainSettings
) -> None:
    tensors = {}
    for name, parameter in gates.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        # Parameters without elements (no sinks) have no gradient and no state.
        for key, value in optimizer.state[parameter].items():
            tensors[f"state.{key}.{name}"] = value.cpu().contiguous()
    metadata = {"settings": _key(gates, settings), "curves": json.dumps(asdict(curves))}
    replace_file(path, lambda unfinished: save_file(tensors, unfinished, metadata), "checkpoint")


def _resume(
    path: Path, gates: Gates, optimizer: torch.optim.Optimizer, curves: LossCurves, settings: TrainSettings
) -> int:
    """Load a checkpoint; returns the step to go on with, 0 when there is none."""
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("settings") != _key(gates, settings):
                raise ConfigError(f"{path} was written with other settings: remove it, or name another --work-dir")
            parameters = dict(gates.named_parameters())
            for stored in sorted(opened.keys()):
                tensor = opened.get_tensor(stored)
                kind, _, name = stored.partition(".")
                if kind == "weight":
                    parameters[name].data.copy_(tensor)
                    continue
                key, _, name = name.partition(".")
                # Adam's step counter stays on the CPU.
                device = parameters[name].device if tensor.dim() else tensor.device
                optimizer.state[parameters[name]][key] = tensor.to(device)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): remove it to train from the start") from error
    found = LossCurves(**json.loads(metadata["curves"]))
    curves.steps, curves.training, curves.held_out = found.steps, found.training, found.held_out
    return curves.steps[-1]


def _key(gates: Gates, settings: TrainSettings) -> str:
    return json.dumps([asdict(gates.config), asdict(settings)], sort_keys=True)
