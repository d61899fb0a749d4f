from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.distill.plot import plot_losses
from sglang_kvtc.distill.shards import ShardReader
from sglang_kvtc.distill.teacher import Target
from sglang_kvtc.distill.train import LossCurves, Optimizer, TrainSettings, layer_losses, learning_rate_factor, train
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, Gates, new_gates

NUM_LAYERS, FEATURES, NUM_KV_HEADS = 3, 12, 2
CONFIG = GateConfig(GateKind.SINK_ATTENTION, GateInput.HIDDEN, NUM_LAYERS, FEATURES, NUM_KV_HEADS, group_size=2)
SETTINGS = TrainSettings(steps=60, batch_tokens=100)
PAPER = TrainSettings(steps=60, batch_tokens=100, optimizer=Optimizer.SGD, target_power=1)
by_recipe = pytest.mark.parametrize("recipe", [SETTINGS, PAPER], ids=["default", "paper"])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    """Two shards of targets that other gates of the same kind made: a loss near its floor can be reached."""
    folder = tmp_path_factory.mktemp("shards")
    taught = new_gates(CONFIG, seed=5)
    with torch.no_grad():
        taught.get_parameter("sinks").normal_(generator=torch.Generator().manual_seed(1))
        taught.get_parameter("q_norm").fill_(3)
    paths = []
    for number in range(2):
        inputs = torch.randn(1200, NUM_LAYERS, FEATURES, generator=torch.Generator().manual_seed(number)).bfloat16()
        with torch.no_grad():
            targets = taught(inputs.float().transpose(0, 1)).transpose(0, 1).contiguous()
        paths.append(folder / f"sequence-{number:05d}.safetensors")
        save_file({"input.hidden": inputs, "target.reconstruction": targets}, paths[-1])
    return ShardReader(paths, GateInput.HIDDEN, Target.RECONSTRUCTION)


def trained(
    reader: ShardReader, settings: TrainSettings = SETTINGS, checkpoint: Path | None = None
) -> tuple[Gates, LossCurves]:
    gates = new_gates(CONFIG, seed=0)
    return gates, train(gates, reader, settings, SilentProgress(), checkpoint=checkpoint)


def test_the_learning_rate_warms_up_and_is_halved_twice() -> None:
    factors = [learning_rate_factor(step, 5000) for step in range(5000)]
    assert factors[0] == 1 / 50
    assert factors[49] == 1
    assert factors[50:2500] == [1] * 2450
    assert factors[2500:3750] == [0.5] * 1250
    assert factors[3750:] == [0.25] * 1250
    assert learning_rate_factor(0, 1) == 1


def test_the_loss_is_the_cross_entropy_of_each_layer() -> None:
    scores, targets = torch.rand(2, 3, 4, 2, generator=torch.Generator().manual_seed(0)).clamp(0.01, 0.99)
    for layer, loss in enumerate(layer_losses(scores, targets).tolist()):
        plain = [
            -(y * math.log(s) + (1 - y) * math.log(1 - s))
            for s, y in zip(scores[layer].flatten().tolist(), targets[layer].flatten().tolist(), strict=True)
        ]
        assert loss == pytest.approx(sum(plain) / len(plain), rel=1e-5)


def test_scores_of_exactly_zero_and_one_keep_the_loss_finite() -> None:
    scores = torch.tensor([0.0, 1.0, 0.0, 1.0], requires_grad=True)
    layer_losses(scores.view(1, 4, 1), torch.tensor([0.0, 1.0, 1.0, 0.5]).view(1, 4, 1)).sum().backward()
    assert scores.grad is not None
    assert bool(torch.isfinite(scores.grad).all())


@by_recipe
def test_the_held_out_loss_falls_towards_its_floor_in_every_layer(reader: ShardReader, recipe: TrainSettings) -> None:
    _, curves = trained(reader, dataclasses.replace(recipe, steps=400, batch_tokens=200))
    assert curves.steps[0] == 0
    assert curves.steps[-1] == 400
    for floor, first, last in zip(curves.floor, curves.held_out[0], curves.held_out[-1], strict=True):
        assert floor < last < floor + (first - floor) / 4


def test_layers_are_trained_as_if_each_were_alone(reader: ShardReader, tmp_path: Path) -> None:
    together, _ = trained(reader)
    shards = []
    for number, (inputs, targets) in enumerate(reader._rows):
        shards.append(tmp_path / f"sequence-{number:05d}.safetensors")
        save_file(
            {
                "input.hidden": inputs[:, 1:2].contiguous(),
                "target.reconstruction": targets[:, 1:2].contiguous(),
            },
            shards[-1],
        )
    alone = new_gates(GateConfig(GateKind.SINK_ATTENTION, GateInput.HIDDEN, 1, FEATURES, NUM_KV_HEADS, 2), seed=0)
    for (_, parameter), (_, whole) in zip(
        alone.named_parameters(), new_gates(CONFIG, 0).named_parameters(), strict=True
    ):
        parameter.data.copy_(whole.data[1:2])
    train(alone, ShardReader(shards, GateInput.HIDDEN, Target.RECONSTRUCTION), SETTINGS, SilentProgress())
    for (name, parameter), (_, whole) in zip(alone.named_parameters(), together.named_parameters(), strict=True):
        torch.testing.assert_close(parameter, whole[1:2], msg=lambda text, name=name: f"{name}: {text}")


def test_the_seed_decides(reader: ShardReader) -> None:
    one, other = trained(reader)[0].state_dict(), trained(reader)[0].state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    moved = trained(reader, TrainSettings(steps=60, batch_tokens=100, seed=1))[0].state_dict()
    assert not torch.equal(one["q_weight"], moved["q_weight"])


class Interrupted(Exception):
    """Raised in the middle of a training."""


@by_recipe
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    reader: ShardReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: TrainSettings
) -> None:
    whole, whole_curves = trained(reader, recipe)
    checkpoint = tmp_path / "training.safetensors"
    read, calls = ShardReader.read, 0

    def interrupted(self: ShardReader, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise Interrupted
        return read(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(ShardReader, "read", interrupted)
        with pytest.raises(Interrupted):
            trained(reader, recipe, checkpoint)
    assert checkpoint.exists()
    resumed, curves = trained(reader, recipe, checkpoint)
    assert curves == whole_curves
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_a_checkpoint_of_other_settings_is_refused(reader: ShardReader, tmp_path: Path) -> None:
    checkpoint = tmp_path / "training.safetensors"
    trained(reader, checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="other settings"):
        trained(reader, TrainSettings(steps=61, batch_tokens=100), checkpoint)
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        trained(reader, checkpoint=checkpoint)


def test_fewer_tokens_than_a_batch_are_refused(reader: ShardReader) -> None:
    with pytest.raises(ConfigError, match="fewer than one batch of 5,000"):
        trained(reader, TrainSettings(steps=10, batch_tokens=5000))


@pytest.mark.parametrize("field", ["steps", "batch_tokens", "learning_rate", "target_power"])
def test_settings_that_cannot_work_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        TrainSettings(**{field: 0})


def test_the_curves_are_drawn(reader: ShardReader, tmp_path: Path) -> None:
    _, curves = trained(reader)
    plot_losses(curves, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
