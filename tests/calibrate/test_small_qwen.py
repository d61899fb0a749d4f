"""The small Qwen3 model: made of a Llama's layers, trained on calibration text only, built once and verified."""

import argparse
import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_kvtc.benchmarks.routines import quality
from sglang_kvtc.calibrate import small_qwen
from sglang_kvtc.calibrate.calibration import calibrate
from sglang_kvtc.calibrate.causal_lm import load_model, prefill
from sglang_kvtc.calibrate.corpus import Document
from sglang_kvtc.calibrate.demo_artifact import demo_calibration
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.small_qwen import NAME, RECORD, QwenTraining, qwen_from_llama, small_qwen_dir, training_rows
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.errors import ConfigError

TRAINING = QwenTraining(
    layers=(1,), rope_theta=3e5, row_tokens=48, rows_per_step=2, steps=24, learning_rate=2e-3, seed=3
)
HELD_OUT_LETTER = "Z"


def documents() -> list[Document]:
    """Two sources. The letter of the held-out documents is in no other."""
    found = [
        Document(source, f"{source} {index}", f"{index}: the {source} fox jumps over the lazy dog.\n" * 40)
        for source in ("quick", "brown")
        for index in range(12)
    ]
    return [
        dataclasses.replace(document, text=HELD_OUT_LETTER * 3000) if document.is_held_out else document
        for document in found
    ]


@pytest.fixture(autouse=True)
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_qwen, "read_documents", lambda sources, tokenizer: documents())


def build(cache_dir: Path, llama_dir: Path, training: QwenTraining = TRAINING) -> Path:
    return small_qwen_dir(SilentProgress(), cache_dir, training=training, llama_dir=llama_dir)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_qwen, "read_documents", lambda sources, tokenizer: documents())
        return build(tmp_path_factory.mktemp("built"), tiny_llama)


def test_model_is_a_qwen3_of_its_own_geometry_with_the_tokenizer_of_the_llama(built: Path, tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(built)
    llama = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert built.name == NAME
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.bfloat16
    config = model.config
    assert (config.num_hidden_layers, llama.config.num_hidden_layers) == (1, 2)
    assert config.rope_parameters == {"rope_theta": 3e5, "rope_type": "default"}
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert model.model.layers[0].self_attn.k_norm.weight.shape == (32,)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (built / name).read_bytes() == (tiny_llama / name).read_bytes()
    assert AutoTokenizer.from_pretrained(built).decode(model.generate(torch.tensor([[65, 66]]), max_new_tokens=3)[0])


def test_loss_falls_and_is_recorded_with_that_of_held_out_text(built: Path) -> None:
    record = json.loads((built / RECORD).read_text())
    losses = torch.tensor(record["losses"])
    assert len(losses) == TRAINING.steps
    quarters = losses.view(4, -1).mean(dim=1).tolist()
    assert quarters == sorted(quarters, reverse=True)
    assert record["training"] == json.loads(json.dumps(dataclasses.asdict(TRAINING)))
    assert record["held_out_documents"] == min(12, sum(document.is_held_out for document in documents()))
    assert record["held_out_nll"].keys() == {"llama", "qwen"}


def test_recorded_losses_are_those_of_the_two_models_on_held_out_text(built: Path, tiny_llama: Path) -> None:
    # All held-out documents are alike, so one of them tells the mean.
    record = json.loads((built / RECORD).read_text())["held_out_nll"]
    token_ids = AutoTokenizer.from_pretrained(built)(HELD_OUT_LETTER * 1216, return_tensors="pt")["input_ids"]
    for name, directory in (("llama", tiny_llama), ("qwen", built)):
        with torch.inference_mode():
            loss = load_model(directory, "bfloat16")(input_ids=token_ids, labels=token_ids).loss
        assert record[name] == pytest.approx(float(loss), rel=2**-20)


def test_held_out_documents_are_never_fed(tmp_path: Path, tiny_llama: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    fed: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled() and module.weight.requires_grad:
            fed.append(inputs[0].clone())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(keep)
    try:
        build(tmp_path, tiny_llama)
    finally:
        handle.remove()
    assert [batch.shape for batch in fed] == [(2, 48)] * TRAINING.steps
    (forbidden,) = tokenizer(HELD_OUT_LETTER)["input_ids"]
    (allowed,) = tokenizer("z")["input_ids"]
    tokens = torch.cat(fed)
    assert bool((tokens == allowed).any())
    assert not bool((tokens == forbidden).any())


def test_two_builds_give_equal_files_and_another_seed_others(tmp_path: Path, built: Path, tiny_llama: Path) -> None:
    assert contents(build(tmp_path / "again", tiny_llama)) == contents(built)
    other = build(tmp_path / "other", tiny_llama, dataclasses.replace(TRAINING, seed=4))
    assert contents(other)["model.safetensors"] != contents(built)["model.safetensors"]


def test_damaged_directory_and_another_training_are_built_again(tmp_path: Path, built: Path, tiny_llama: Path) -> None:
    directory = shutil.copytree(built, tmp_path / NAME)
    assert build(tmp_path, tiny_llama) == directory
    weights = directory / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    assert contents(build(tmp_path, tiny_llama)) == contents(built)
    longer = dataclasses.replace(TRAINING, steps=25)
    assert len(json.loads((build(tmp_path, tiny_llama, longer) / RECORD).read_text())["losses"]) == 25


class Interrupted(Exception):
    pass


class InterruptingProgress:
    """Ends the training after some steps, and counts the steps that were reported."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @contextlib.contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
        def advance(units: int) -> None:
            self.left -= units
            if self.left <= 0:
                raise Interrupted

        yield advance


def test_interrupted_build_leaves_no_directory_and_goes_on_where_it_was_saved(
    tmp_path: Path, built: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_qwen, "_SAVE_EVERY", 5)
    with pytest.raises(Interrupted):
        small_qwen_dir(InterruptingProgress(13), tmp_path, training=TRAINING, llama_dir=tiny_llama)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert len(list(tmp_path.glob("*.checkpoint.safetensors"))) == 1

    monkeypatch.setattr(small_qwen, "_SAVE_EVERY", 100)
    resumed = InterruptingProgress(TRAINING.steps + 1)
    directory = small_qwen_dir(resumed, tmp_path, training=TRAINING, llama_dir=tiny_llama)
    assert resumed.left == 1
    assert contents(directory) == contents(built)
    assert list(tmp_path.glob("*.checkpoint.safetensors")) == []


@pytest.mark.parametrize("damage", ["other training", "truncated"])
def test_checkpoint_that_does_not_fit_is_passed_over(
    tmp_path: Path, built: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(small_qwen, "_SAVE_EVERY", 5)
    training = dataclasses.replace(TRAINING, seed=8) if damage == "other training" else TRAINING
    with pytest.raises(Interrupted):
        small_qwen_dir(InterruptingProgress(13), tmp_path, training=training, llama_dir=tiny_llama)
    (checkpoint,) = tmp_path.glob("*.checkpoint.safetensors")
    if damage == "truncated":
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert contents(build(tmp_path, tiny_llama)) == contents(built)


def test_rows_come_from_every_source_by_the_root_of_its_size(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = {"small": "s" * 480, "large": "l" * 480 * 16, "too short": "t" * 47}
    found = [Document(source, source, text) for source, text in texts.items()]
    rows = training_rows(found, tokenizer, TRAINING)
    counts = {"s": 0, "l": 0}
    for _ in range(1000):
        row = next(rows)
        (letter,) = set(tokenizer.decode(row))
        assert row.shape == (48,)
        counts[letter] += 1
    # One in five on average, with a standard deviation of sqrt(1000 x 0.2 x 0.8) = 12.6.
    assert abs(counts["s"] - 200) < 4 * 12.6
    assert counts["s"] + counts["l"] == 1000

    numbered = Document("a", "a", "".join(f"{index:048d}" for index in range(30)))
    first_pass = [tokenizer.decode(row) for row in islice(training_rows([numbered], tokenizer, TRAINING), 30)]
    assert sorted(map(int, first_pass)) == list(range(30)) != list(map(int, first_pass))
    with pytest.raises(ConfigError, match="no 48 tokens"):
        next(training_rows([Document("a", "a", "t" * 47)], tokenizer, TRAINING))


def llama_with_queries_and_keys_of_one_length() -> Any:
    """Heads as wide as the hidden state, whose projections only permute it, change signs and double it."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            initializer_range=0.2,
            rms_norm_eps=1e-9,
        )
    ).to(torch.bfloat16)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            for head in projection.weight.data.view(-1, 32, 32):
                signs = torch.randint(0, 2, (32, 1), generator=generator) * 4.0 - 2
                head.copy_(torch.eye(32)[torch.randperm(32, generator=generator)] * signs)
    return model.eval().requires_grad_(False)


def test_untrained_model_is_the_llama_where_queries_and_keys_have_one_length() -> None:
    llama = llama_with_queries_and_keys_of_one_length()
    token_ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(6))
    training = QwenTraining(layers=(0, 1, 2), rope_theta=10_000.0)
    qwen = qwen_from_llama(llama, training, token_ids).float()
    for layer in qwen.model.layers:
        assert torch.equal(layer.self_attn.q_norm.weight, torch.full((32,), 2.0))
        assert torch.equal(layer.self_attn.k_norm.weight, torch.full((32,), 2.0))
    with torch.inference_mode():
        found = qwen(input_ids=token_ids).logits
        in_fp32 = llama.float()(input_ids=token_ids).logits
        reference = llama.double()(input_ids=token_ids).logits
    assert float((found - reference).abs().max()) <= 2 * float((in_fp32 - reference).abs().max())


def test_untrained_norms_keep_directions_and_the_mean_square(tiny_llama: Path) -> None:
    llama = load_model(tiny_llama, "float32")
    token_ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(6))
    qwen = qwen_from_llama(llama, QwenTraining(layers=(0, 1)), token_ids).float()
    outputs: dict[str, torch.Tensor] = {}
    attentions = {"llama": llama.model.layers[0].self_attn, "qwen": qwen.model.layers[0].self_attn}
    for side in "qk":
        for name, module in (("llama", f"{side}_proj"), ("qwen", f"{side}_norm")):
            getattr(attentions[name], module).register_forward_hook(
                lambda module, inputs, output, key=side + name: (
                    outputs.update({key: output.unflatten(-1, (-1, 32))})
                    if key.endswith("llama")
                    else outputs.update({key: output})
                )
            )
    with torch.inference_mode():
        llama(input_ids=token_ids)
        qwen(input_ids=token_ids)
    for side in "qk":
        before, after = outputs[side + "llama"].double(), outputs[side + "qwen"].double()
        length = before.square().mean().sqrt()
        # The norm's weight is bfloat16, the rest fp32 with a sum of 32 squares.
        expected = before * length / before.square().mean(dim=-1, keepdim=True).sqrt()
        assert bool(((after - expected).abs() <= expected.abs() * 2**-8).all())


def test_calibration_takes_it_and_sees_normed_keys_before_rope(built: Path) -> None:
    artifact = calibrate(demo_calibration(built, 2000, (4.0,)), SilentProgress())
    assert artifact.fingerprint.architecture == "Qwen3ForCausalLM"
    assert artifact.rope.inv_freq[1] == pytest.approx(3e5 ** (-1 / 16))
    model = load_model(built, "float32")
    token_ids = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    keys, _ = prefill(model, token_ids)
    unrotated = rotate(keys, torch.arange(100), artifact.rope, inverse=True)
    weight = load_file(built / "model.safetensors")["model.layers.0.self_attn.k_norm.weight"].float()
    rms = (unrotated[0] / weight).square().mean(dim=-1).sqrt()
    # fp32 angles up to 100 radians are off by 100 * 2**-24, once each way.
    assert float((rms - 1).abs().max()) < 2 * 100 * 2**-24 * float(weight.max() / weight.min())


@pytest.mark.parametrize("arguments", ["", "--family llama", "--family qwen", "--family qwen --model {own}"])
def test_bench_quality_finds_a_model_by_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    llama, qwen, own = (tmp_path / name for name in ("llama", "qwen", "own"))

    def calibration(model_dir: Path, num_tokens: int, ratios: tuple[float, ...]) -> None:
        raise ConfigError(f"asked for {model_dir.name}")

    monkeypatch.setattr(quality, "demo_model_dir", lambda cache_dir: llama)
    monkeypatch.setattr(quality, "small_qwen_dir", lambda progress, cache_dir: qwen)
    monkeypatch.setattr(quality, "demo_calibration", calibration)
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    expected = own if "own" in arguments else qwen if "qwen" in arguments else llama
    with pytest.raises(ConfigError, match=f"asked for {expected.name}"):
        quality.run(parser.parse_args(arguments.format(own=own).split()))
