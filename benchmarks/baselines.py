"""Other ways to store a KV cache, each counting every byte it would store.

`fp8`, `integer`, `per_head_svd` and `truncated_pca` code any stretch of tokens; `kivi` codes a whole cache, since it
decides itself what stays raw. keys, values: dtype[num_layers, num_tokens, num_kv_heads, head size], K after RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvtc.artifact.schema import MAX_WIDTH, Artifact, Group, RopeSpec, SidePlan
from sglang_kvtc.bitstream import entropy
from sglang_kvtc.bitstream.entropy import Coder
from sglang_kvtc.bitstream.shuffle import shuffle
from sglang_kvtc.codec.decode import CodedFrame
from sglang_kvtc.codec.encode import centred_features
from sglang_kvtc.codec.rope import Rotation, rotate
from sglang_kvtc.codec.transform import SideCoding
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side, TokenRange

_GROUP = 32
_PARAM_BYTES = 4
"""A 16-bit scale and a 16-bit zero point per group."""
_FLOAT_BYTES = 2
_F16_MAX = float(torch.finfo(torch.float16).max)
_DEFLATE_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Coded:
    """Keys and values after a round trip, in the shapes and dtype they came in, and the bytes stored in between."""

    keys: torch.Tensor
    values: torch.Tensor
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class CodedCache:
    """A whole cache after a round trip, in the shapes and dtype it came in.

    coded_bytes: 16-bit size of the part that a ratio is about, and stored_bytes what is stored for that part.
    """

    keys: torch.Tensor
    values: torch.Tensor
    coded_bytes: int
    stored_bytes: int

    @property
    def whole_bytes(self) -> int:
        """16-bit size of the whole cache."""
        return _FLOAT_BYTES * (self.keys.numel() + self.values.numel())


def fp8(keys: torch.Tensor, values: torch.Tensor, start_position: int) -> Coded:
    """Cast to FP8 E4M3 without scales, as SGLang's `--kv-cache-dtype fp8_e4m3` does."""
    stored = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    return Coded(stored[0].to(keys), stored[1].to(values), keys.numel() + values.numel())


def integer(keys: torch.Tensor, values: torch.Tensor, start_position: int, *, rope: RopeSpec, num_bits: int) -> Coded:
    """KIVI's quantiser on K before RoPE, which is better than its own: per-channel K, per-token V, groups of 32.

    Asymmetric min/max; the last group of a row may be shorter.
    """
    positions = torch.arange(start_position, start_position + keys.shape[1])
    unrotated = rotate(keys.float(), positions, rope, inverse=True)
    coded_keys, key_bytes = _quantize_channels(unrotated, num_bits)
    coded_values, value_bytes = _quantize_groups(values.float(), num_bits)
    rotated = rotate(coded_keys, positions, rope)
    return Coded(rotated.to(keys), coded_values.to(values), key_bytes + value_bytes)


def kivi(keys: torch.Tensor, values: torch.Tensor, *, num_bits: int, residual_tokens: int) -> CodedCache:
    """KIVI (Liu et al. 2024, section 3.3) on a whole cache, as its released code stores a prefill.

    K after RoPE per channel in groups of 32 tokens, V per token in groups of 32 channels. The last `residual_tokens` of
    V stay raw, and those of K that fill no block of as many. With 0, everything is coded.
    """
    num_tokens = keys.shape[1]
    key_stop = num_tokens - num_tokens % residual_tokens if residual_tokens else num_tokens
    value_stop = max(0, num_tokens - residual_tokens)
    coded_keys, key_bytes = _quantize_channels(keys[:, :key_stop].float(), num_bits)
    coded_values, value_bytes = _quantize_groups(values[:, :value_stop].float(), num_bits)
    return CodedCache(
        torch.cat([coded_keys.to(keys), keys[:, key_stop:]], dim=1),
        torch.cat([coded_values.to(values), values[:, value_stop:]], dim=1),
        coded_bytes=_FLOAT_BYTES * (coded_keys.numel() + coded_values.numel()),
        stored_bytes=key_bytes + value_bytes,
    )


def per_head_svd(
    keys: torch.Tensor, values: torch.Tensor, start_position: int, *, rope: RopeSpec, target_ratio: float
) -> Coded:
    """A low-rank factorisation of every layer's and head's K before RoPE and V, computed for these very tokens.

    Both factors and the mean are stored as 16-bit floats. The rank is the largest with which they take at most a
    `target_ratio`-th of the bytes; 0 leaves the mean.
    """
    positions = torch.arange(start_position, start_position + keys.shape[1])
    low_keys, key_bytes = _low_rank(rotate(keys.float(), positions, rope, inverse=True), target_ratio)
    low_values, value_bytes = _low_rank(values.float(), target_ratio)
    return Coded(rotate(low_keys, positions, rope).to(keys), low_values.to(values), key_bytes + value_bytes)


def truncated_pca(
    keys: torch.Tensor, values: torch.Tensor, start_position: int, *, artifact: Artifact, target_ratio: float
) -> Coded:
    """The codec's transform without its quantiser (-DPQ, KVTC appendix B.9): the first components as 16-bit floats.

    `1 / target_ratio` of the components of either side are kept; their bytes go through DEFLATE as in the paper, in
    byte planes. Raises ConfigError when the artifact has too few components.
    """
    num_layers, num_tokens, num_kv_heads, _ = keys.shape
    positions = torch.arange(start_position, start_position + num_tokens)
    undo = Rotation(positions, artifact.rope, num_kv_heads, inverse=True)
    codings, coefficients = [], []
    stored_bytes = 0
    for side, heads, rotation in ((Side.K, keys, undo), (Side.V, values, None)):
        coding = _first_components(artifact, side, target_ratio)
        kept = _as_f16(coding.transform.project(centred_features(heads, coding, rotation)))
        planes = shuffle(kept.view(torch.uint8).numpy().reshape(-1), _FLOAT_BYTES)
        stored_bytes += min(len(planes), len(entropy.encode(planes, Coder.DEFLATE, _DEFLATE_LEVEL)))
        restored = coding.transform.empty_coefficients(num_tokens)
        restored[: len(kept)] = kept
        codings.append(coding)
        coefficients.append(restored.T.contiguous())
    rotation = Rotation(positions, artifact.rope, num_kv_heads)
    frame = CodedFrame((codings[0], codings[1]), (coefficients[0], coefficients[1]), rotation, num_kv_heads, keys.dtype)
    return Coded(*frame.reconstruct(range(num_layers), TokenRange(0, num_tokens)), stored_bytes)


def _low_rank(heads: torch.Tensor, target_ratio: float) -> tuple[torch.Tensor, int]:
    """The best approximation of [num_layers, num_tokens, num_kv_heads, head size], f32, and the bytes it takes."""
    matrices = heads.transpose(1, 2)
    num_tokens, head_dim = matrices.shape[2:]
    room = num_tokens * head_dim / target_ratio - head_dim
    rank = min(max(0, int(room / (num_tokens + head_dim))), head_dim)
    mean = matrices.mean(dim=2, keepdim=True).half().float()
    centred = matrices - mean
    _, vectors = torch.linalg.eigh(centred.transpose(2, 3) @ centred)
    directions = vectors[..., head_dim - rank :].half().float()
    factors = _as_f16(centred @ directions).float()
    num_matrices = matrices.shape[0] * matrices.shape[1]
    stored_bytes = _FLOAT_BYTES * num_matrices * (rank * (num_tokens + head_dim) + head_dim)
    return (factors @ directions.transpose(2, 3) + mean).transpose(1, 2), stored_bytes


def _first_components(artifact: Artifact, side: Side, target_ratio: float) -> SideCoding:
    """The transform of one side with as many components as `1 / target_ratio` of its features."""
    basis = artifact.basis(side)
    num_kept = int(artifact.geometry.features(side) / target_ratio)
    num_found = 0 if basis is None else basis.basis.shape[1]
    if basis is None or num_kept > num_found:
        raise ConfigError(
            f"ratio {target_ratio:g} keeps {num_kept} components, more than the artifact's {num_found}: calibrate it "
            "with a lower ratio too"
        )
    plan = SidePlan((Group(0, num_kept, MAX_WIDTH),), predicted_error=0.0)
    return SideCoding.from_plan(basis, plan, artifact.geometry.num_layers, torch.float32)


def _as_f16(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_F16_MAX, _F16_MAX).half()


def _quantize_channels(keys: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, int]:
    """Like `_quantize_groups`, with groups along the tokens of [num_layers, num_tokens, num_kv_heads, head_dim]."""
    coded, stored_bytes = _quantize_groups(keys.movedim(1, -1), num_bits)
    return coded.movedim(-1, 1), stored_bytes


def _quantize_groups(rows: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, int]:
    """Quantise groups of 32 along the last axis; return the restored f32 rows and the bytes they take."""
    restored = torch.empty_like(rows)
    if not rows.numel():
        return restored, 0
    num_groups = 0
    for source, target in zip(rows.split(_GROUP, dim=-1), restored.split(_GROUP, dim=-1), strict=True):
        low = source.amin(dim=-1, keepdim=True).half().float()
        scale = ((source.amax(dim=-1, keepdim=True) - low) / (2**num_bits - 1)).half().float()
        symbols = ((source - low) / scale.where(scale > 0, 1.0)).round().clamp(0, 2**num_bits - 1)
        target.copy_(symbols * scale + low)
        num_groups += low.numel()
    return restored, (rows.numel() * num_bits + 7) // 8 + num_groups * _PARAM_BYTES
