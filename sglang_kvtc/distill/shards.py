"""Activations and targets on disk, a safetensors file per sequence: training needs no more memory than a batch.

A shard holds inputs `input.<GateInput>`: bf16[num_tokens, num_layers, features] and targets `target.<Target>`:
f32[num_tokens, num_layers, num_kv_heads]: token first, so that one token of all layers is read at one place.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_kvtc.artifact.container import replace_file
from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.calibrate.attention_hook import attention_inputs
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.distill.teacher import Context, Target
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import GateInput
from sglang_kvtc.types import ModelGeometry

logger = logging.getLogger(__name__)

HELD_OUT_ONE_IN = 100
"""Every hundredth token is held out from training."""


@dataclass(frozen=True, slots=True)
class ShardContent:
    """What is kept of every token."""

    inputs: tuple[GateInput, ...] = (GateInput.HIDDEN,)
    targets: tuple[Target, ...] = (Target.RECONSTRUCTION,)

    def bytes_per_token(self, geometry: ModelGeometry, hidden_size: int) -> int:
        features = [
            hidden_size if source is GateInput.HIDDEN else geometry.num_kv_heads * geometry.head_dim
            for source in self.inputs
        ]
        return geometry.num_layers * (2 * sum(features) + 4 * geometry.num_kv_heads * len(self.targets))


def write_shards(
    model: Any,
    tokenizer: Any,
    sequences: Sequence[TokenSequence],
    folder: Path,
    content: ShardContent,
    rope: RopeSpec,
    geometry: ModelGeometry,
    progress: Progress,
) -> list[Path]:
    """Run model and teacher over every sequence whose shard is not there yet; returns all paths in order.

    Raises ConfigError when the disk has no room for what is missing.
    """
    paths = [folder / f"sequence-{number:05d}.safetensors" for number in range(len(sequences))]
    missing = [(path, sequence) for path, sequence in zip(paths, sequences, strict=True) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    per_token = content.bytes_per_token(geometry, model.config.get_text_config(decoder=True).hidden_size)
    needed = per_token * sum(len(sequence.token_ids) for _, sequence in missing)
    if needed > (free := shutil.disk_usage(folder).free):
        raise ConfigError(
            f"the activations need {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free: "
            "name another --work-dir or ask for fewer --tokens"
        )
    if len(missing) < len(paths):
        logger.info("%d of %d sequences were scored before", len(paths) - len(missing), len(paths))
    with progress.stage("teacher", sum(len(sequence.token_ids) for _, sequence in missing), "tokens") as advance:
        for path, sequence in missing:
            tensors = _observe(model, tokenizer, sequence.token_ids, content, rope)
            replace_file(path, functools.partial(save_file, tensors), "activations")
            advance(len(sequence.token_ids))
    return paths


def _observe(
    model: Any, tokenizer: Any, token_ids: Sequence[int], content: ShardContent, rope: RopeSpec
) -> dict[str, torch.Tensor]:
    hidden: list[list[torch.Tensor]] = []

    def receive(layer: int, hidden_states: torch.Tensor) -> None:
        if layer == len(hidden):
            hidden.append([])
        hidden[layer].append(hidden_states.to("cpu", torch.bfloat16))

    context = Context(model, tokenizer, token_ids)
    with attention_inputs(model, receive):
        context.prefill(next_token_peaks=Target.NEXT_TOKEN in content.targets)
    tensors: dict[str, torch.Tensor] = {}
    for source in content.inputs:
        if source is GateInput.HIDDEN:
            rows = torch.stack([torch.cat(chunks) for chunks in hidden], dim=1)
        else:
            keys = context.keys().to("cpu", torch.float32)
            if source is GateInput.KEYS_BEFORE_ROPE:
                keys = rotate(keys, torch.arange(len(token_ids)), rope, inverse=True)
            rows = keys.transpose(0, 1).flatten(2).bfloat16()
        tensors[f"input.{source}"] = rows.contiguous()
    scorers = {
        Target.RECONSTRUCTION: context.reconstruction_scores,
        Target.NEXT_TOKEN: context.next_token_scores,
        Target.INSTRUCTION: context.instruction_scores,
    }
    for target in content.targets:
        tensors[f"target.{target}"] = scorers[target]().transpose(0, 1).contiguous().cpu()
    return tensors


class ShardReader:
    """Rows of one input and one target of all shards. The files are mapped, not read.

    Tokens are numbered through all shards in order. Raises ConfigError for a shard that cannot be read.
    """

    def __init__(self, paths: Sequence[Path], source: GateInput, target: Target, max_tokens: int | None = None) -> None:
        """max_tokens: use only so many of the first tokens."""
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for path in paths:
            try:
                with safe_open(path, framework="pt") as shard:
                    self._rows.append((shard.get_tensor(f"input.{source}"), shard.get_tensor(f"target.{target}")))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be used ({error}): remove it to have it made again") from error
        ends = torch.tensor([len(inputs) for inputs, _ in self._rows]).cumsum(0)
        self._starts = ends - torch.tensor([len(inputs) for inputs, _ in self._rows])
        self._ends = ends
        numbers = torch.arange(min(int(ends[-1]), max_tokens or int(ends[-1])))
        self.held_out = numbers[numbers % HELD_OUT_ONE_IN == HELD_OUT_ONE_IN - 1]
        self.training = numbers[numbers % HELD_OUT_ONE_IN != HELD_OUT_ONE_IN - 1]

    @property
    def input_features(self) -> int:
        return int(self._rows[0][0].shape[2])

    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs f32[num_layers, n, features] and targets f32[num_layers, n, num_kv_heads] of tokens i64[n].

        Sorted by token: the order inside a batch does not matter, and files are read forwards.
        """
        tokens = tokens.sort().values
        owners = torch.searchsorted(self._ends, tokens, right=True)
        inputs, targets = [], []
        for shard, count in zip(*owners.unique_consecutive(return_counts=True), strict=True):
            own, tokens = tokens[:count] - self._starts[shard], tokens[count:]
            rows = self._rows[int(shard)]
            inputs.append(rows[0].index_select(0, own))
            targets.append(rows[1].index_select(0, own))
        return (
            # Transposed before the conversion: torch is slow at doing both at once.
            torch.cat(inputs).transpose(0, 1).contiguous().float(),
            torch.cat(targets).transpose(0, 1).contiguous(),
        )
