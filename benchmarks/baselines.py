"""Simple KV quantisers that `bench quality` compares the codec with, each counting every byte it would store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.codec.rope import rotate

_GROUP = 32
_PARAM_BYTES = 4
"""A 16-bit scale and a 16-bit zero point per group."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Keys and values after a round trip, in the shapes and dtype they came in, and the bytes stored in between."""

    keys: torch.Tensor
    values: torch.Tensor
    stored_bytes: int


def fp8(keys: torch.Tensor, values: torch.Tensor, start_position: int) -> Coded:
    """Cast to FP8 E4M3 without scales, as SGLang's `--kv-cache-dtype fp8_e4m3` does."""
    stored = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    return Coded(stored[0].to(keys), stored[1].to(values), keys.numel() + values.numel())


def integer(keys: torch.Tensor, values: torch.Tensor, start_position: int, *, rope: RopeSpec, num_bits: int) -> Coded:
    """KIVI's scheme (Liu et al. 2024): K per channel before RoPE, V per token, asymmetric min/max in groups of 32.

    keys, values: float[num_layers, num_tokens, num_kv_heads, head_dim]. Groups of K run along the tokens, groups of V
    along the channels of a head; the last group of a row may be shorter.
    """
    positions = torch.arange(start_position, start_position + keys.shape[1])
    unrotated = rotate(keys.float(), positions, rope, inverse=True)
    coded_keys, key_bytes = _quantize_groups(unrotated.movedim(1, -1), num_bits)
    coded_values, value_bytes = _quantize_groups(values.float(), num_bits)
    rotated = rotate(coded_keys.movedim(-1, 1), positions, rope)
    return Coded(rotated.to(keys), coded_values.to(values), key_bytes + value_bytes)


def _quantize_groups(rows: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, int]:
    """Quantise groups of 32 along the last axis; return the restored f32 rows and the bytes they take."""
    restored = torch.empty_like(rows)
    num_groups = 0
    for source, target in zip(rows.split(_GROUP, dim=-1), restored.split(_GROUP, dim=-1), strict=True):
        low = source.amin(dim=-1, keepdim=True).half().float()
        scale = ((source.amax(dim=-1, keepdim=True) - low) / (2**num_bits - 1)).half().float()
        symbols = ((source - low) / scale.where(scale > 0, 1.0)).round().clamp(0, 2**num_bits - 1)
        target.copy_(symbols * scale + low)
        num_groups += low.numel()
    return restored, (rows.numel() * num_bits + 7) // 8 + num_groups * _PARAM_BYTES
