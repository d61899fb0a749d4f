from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from sglang_kvtc.calibrate.attention_hook import attention_modules
from sglang_kvtc.calibrate.causal_lm import load_config, load_model, model_geometry, prefill
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.codec.rope import rope_spec_from_config, rotate
from sglang_kvtc.distill import teacher
from sglang_kvtc.distill.shards import ShardContent, ShardReader, write_shards
from sglang_kvtc.distill.teacher import Target, reconstruction_scores
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import GateInput

SEQUENCES = [TokenSequence(f"text {number}", tuple(range(number, 60 + 7 * number))) for number in range(5)]
EVERYTHING = ShardContent(tuple(GateInput), (Target.RECONSTRUCTION, Target.NEXT_TOKEN))


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_model(tiny_llama, "float32")


def write(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    sequences: Sequence[TokenSequence] = SEQUENCES,
    content: ShardContent = EVERYTHING,
) -> list[Path]:
    config = model.config
    rope = rope_spec_from_config(config.to_dict())
    return write_shards(model, tokenizer, sequences, folder, content, rope, model_geometry(config), SilentProgress())


@pytest.fixture(scope="module")
def paths(model: Any, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(model, tokenizer, tmp_path_factory.mktemp("shards"))


def test_a_shard_holds_what_enters_attention_the_keys_and_the_scores(
    model: Any, tokenizer: PreTrainedTokenizerFast, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = SEQUENCES[2]
    shard = load_file(paths[2])
    seen: dict[int, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: seen.__setitem__(layer, kwargs["hidden_states"][0]), with_kwargs=True
        )
        for layer, module in enumerate(attention_modules(model))
    ]
    keys, _ = prefill(model, sequence.token_ids)
    for handle in handles:
        handle.remove()
    expected = {
        "input.hidden": torch.stack([seen[0], seen[1]], dim=1),
        "input.keys": keys.transpose(0, 1).flatten(2),
        "input.keys-before-rope": rotate(
            keys, torch.arange(len(sequence.token_ids)), rope_spec_from_config(model.config.to_dict()), inverse=True
        )
        .transpose(0, 1)
        .flatten(2),
        "target.reconstruction": reconstruction_scores(model, tokenizer, sequence.token_ids).transpose(0, 1),
    }
    assert shard.keys() == {*expected, "target.next-token"}
    for name, tensor in expected.items():
        # Inputs are stored in bfloat16.
        tolerance = {"rtol": 2**-7, "atol": 1e-5} if name.startswith("input") else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(shard[name].float(), tensor, **tolerance)


def test_prefilling_in_chunks_stores_the_same(
    model: Any, tokenizer: PreTrainedTokenizerFast, paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "CHUNK_TOKENS", 25)
    (chunked,) = write(model, tokenizer, tmp_path, SEQUENCES[:1])
    whole, chunks = load_file(paths[0]), load_file(chunked)
    for name in ("input.hidden", "input.keys", "target.next-token"):
        torch.testing.assert_close(chunks[name].float(), whole[name].float(), rtol=2**-7, atol=1e-5)


def test_what_was_scored_before_is_not_scored_again(
    model: Any, tokenizer: PreTrainedTokenizerFast, paths: list[Path], tmp_path: Path
) -> None:
    for path in paths[:4]:
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / paths[1].name).unlink()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = write(model, tokenizer, tmp_path)
    assert [path.name for path in again] == [path.name for path in paths]
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    for old, new in zip(paths, again, strict=True):
        assert old.read_bytes() == new.read_bytes()


def test_a_disk_without_room_is_noticed_before_the_work(
    model: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"activations need .* --work-dir"):
        write(model, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_stored_bytes_are_those_announced(model: Any, tiny_llama: Path, paths: list[Path]) -> None:
    geometry = model_geometry(load_config(tiny_llama))
    per_token = EVERYTHING.bytes_per_token(geometry, model.config.hidden_size)
    for path, sequence in zip(paths, SEQUENCES, strict=True):
        header = int.from_bytes(path.read_bytes()[:8], "little") + 8
        assert path.stat().st_size - header == per_token * len(sequence.token_ids)


def test_rows_are_read_by_their_number_through_all_shards(paths: list[Path]) -> None:
    reader = ShardReader(paths, GateInput.HIDDEN, Target.RECONSTRUCTION)
    shards = [load_file(path) for path in paths]
    inputs = torch.cat([shard["input.hidden"] for shard in shards]).float()
    targets = torch.cat([shard["target.reconstruction"] for shard in shards])
    numbers = torch.tensor([3, len(inputs) - 1, 60, 59, 61, 200])
    found_inputs, found_targets = reader.read(numbers)
    ordered = numbers.sort().values
    assert torch.equal(found_inputs, inputs[ordered].transpose(0, 1))
    assert torch.equal(found_targets, targets[ordered].transpose(0, 1))


def test_every_hundredth_token_is_held_out(paths: list[Path]) -> None:
    reader = ShardReader(paths, GateInput.HIDDEN, Target.RECONSTRUCTION)
    num_tokens = sum(len(sequence.token_ids) for sequence in SEQUENCES)
    assert reader.held_out.tolist() == list(range(99, num_tokens, 100))
    assert sorted(reader.held_out.tolist() + reader.training.tolist()) == list(range(num_tokens))
    fewer = ShardReader(paths, GateInput.HIDDEN, Target.RECONSTRUCTION, max_tokens=150)
    assert sorted(fewer.held_out.tolist() + fewer.training.tolist()) == list(range(150))


def test_a_damaged_shard_is_named(paths: list[Path], tmp_path: Path) -> None:
    damaged = tmp_path / "sequence-00000.safetensors"
    damaged.write_bytes(paths[0].read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"sequence-00000.*remove it"):
        ShardReader([damaged], GateInput.HIDDEN, Target.RECONSTRUCTION)


def test_a_shard_without_the_target_is_named(paths: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"sequence-00000.*instruction"):
        ShardReader(paths, GateInput.HIDDEN, Target.INSTRUCTION)
