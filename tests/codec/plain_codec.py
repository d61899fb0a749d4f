"""The codec again, slow and plain: no layout tricks, no folded weights, no code of `sglang_kvtc.codec`.

In float64 it is the oracle. In another dtype it is the straightforward torch path that our error is compared with.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from sglang_kvtc.artifact.schema import Artifact, Group, RopeSpec, SideBasis, SidePlan
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import Frame, SectionId, open_frame
from sglang_kvtc.types import Side

SECTIONS = {
    Side.K: (SectionId.K_PARAMS, SectionId.K_SYMBOLS),
    Side.V: (SectionId.V_PARAMS, SectionId.V_SYMBOLS),
}


class PlainCodec:
    """First plan of an artifact. All tensors it returns have its dtype."""

    def __init__(self, artifact: Artifact, dtype: torch.dtype = torch.float64) -> None:
        self.artifact = artifact
        self.dtype = dtype

    def coefficients(self, side: Side, values: torch.Tensor, start_position: int) -> torch.Tensor:
        """[num_tokens, kept components] of keys or values [num_layers, num_tokens, num_kv_heads, head size]."""
        values = values.to(self.dtype)
        if side is Side.K:
            values = rotate(values, start_position, self.artifact.rope, inverse=True)
        features = torch.stack([values[:, token].flatten() for token in range(values.shape[1])])
        basis = self._basis(side)
        centred = (features - self._tensor(basis.mean)) @ self._weights(side)
        return centred @ self._tensor(basis.basis)[:, self._columns(side)]

    def values(self, side: Side, coefficients: torch.Tensor, start_position: int) -> torch.Tensor:
        """Inverse of `coefficients`: [num_layers, num_tokens, num_kv_heads, head size]."""
        geometry, basis = self.artifact.geometry, self._basis(side)
        columns = self._tensor(basis.basis)[:, self._columns(side)]
        centred = (coefficients.to(self.dtype) @ columns.T) @ self._weights(side, inverse=True)
        features = centred + self._tensor(basis.mean)
        head_dim = geometry.head_dim if side is Side.K else geometry.v_head_dim
        values = features.reshape(-1, geometry.num_layers, geometry.num_kv_heads, head_dim).transpose(0, 1)
        if side is Side.K:
            values = rotate(values, start_position, self.artifact.rope, inverse=False)
        return values

    def _weights(self, side: Side, inverse: bool = False) -> torch.Tensor:
        """The weights of all heads as one block-diagonal matrix [p, p]."""
        basis = self._basis(side)
        if basis.weights is None:
            return torch.eye(len(basis.mean), dtype=self.dtype)
        blocks = torch.from_numpy(basis.weights).double().flatten(0, 1)
        return torch.block_diag(*(blocks.inverse() if inverse else blocks)).to(self.dtype)

    def round_trip(self, side: Side, values: torch.Tensor, start_position: int) -> torch.Tensor:
        """Encode and decode."""
        coefficients = self.coefficients(side, values, start_position).double()
        decoded = torch.empty_like(coefficients)
        plan, deviations = self.artifact.plans[0].side(side), np.sqrt(self._basis(side).variances.astype(float))
        for token in range(len(coefficients)):
            row = 0
            if plan.step:
                kept = torch.from_numpy(deviations[plan.columns])
                decoded[token] = levels_and_back(coefficients[token], plan, kept)[1]
                continue
            for group in plan.groups:
                rows = slice(row, row + group.size)
                decoded[token, rows] = quantize_and_back(coefficients[token, rows], group)
                row += group.size
        return self.values(side, decoded, start_position)

    def frame_coefficients(self, side: Side, frame: bytes) -> torch.Tensor:
        """The coefficients that a CODED frame holds: f64[num_tokens, kept components]."""
        opened = open_frame(frame)
        plan = self.artifact.plans[0].side(side)
        params_id, symbols_id = SECTIONS[side]
        num_tokens = opened.header.num_tokens
        if plan.step:
            return self._uniform_coefficients(opened, side)
        params = opened.section(params_id).view(np.float16).reshape(2, len(plan.groups), num_tokens)
        symbols = bitpack.unpack(opened.section(symbols_id), plan.widths, num_tokens)
        rows = []
        for index, group in enumerate(plan.groups):
            for _ in range(group.size):
                rows.append(params[0, index].astype(float) + params[1, index].astype(float) * symbols[len(rows)])
        return torch.from_numpy(np.stack(rows, axis=1))

    def _uniform_coefficients(self, opened: Frame, side: Side) -> torch.Tensor:
        plan = self.artifact.plans[0].side(side)
        params_id, symbols_id = SECTIONS[side]
        steps = [token_step(plan.step, int(code)) for code in opened.section(params_id)]
        packed, num_tokens = opened.section(symbols_id), opened.header.num_tokens
        rows: list[np.ndarray] = []
        for group in plan.groups:
            upper, lower = min(group.width, 8), max(0, group.width - 8)
            parts = []
            for width in (upper, lower):
                size = group.size * (width * num_tokens + 7 >> 3)
                part, packed = packed[:size], packed[size:]
                parts.append(bitpack.unpack(part, np.full(group.size, width, np.uint8), num_tokens).astype(float))
            rows.extend(parts[0] * 2**lower + parts[1] - 2 ** (group.width - 1))
        assert not len(packed)
        return torch.from_numpy(np.stack(rows, axis=1) * np.array(steps)[:, None])

    def _basis(self, side: Side) -> SideBasis:
        basis = self.artifact.basis(side)
        if basis is None:
            raise ValueError("the artifact has no bases")
        return basis

    def _columns(self, side: Side) -> torch.Tensor:
        return torch.from_numpy(self.artifact.plans[0].side(side).columns)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.dtype)


def rotate(keys: torch.Tensor, start_position: int, rope: RopeSpec, inverse: bool) -> torch.Tensor:
    """Rotate pair by pair in the dtype of `keys`; positions follow each other from `start_position`."""
    rotated = keys.clone()
    positions = torch.arange(start_position, start_position + keys.shape[1], dtype=torch.float64)
    factor = 1 / rope.attention_factor if inverse else rope.attention_factor
    for pair, frequency in enumerate(rope.inv_freq):
        if rope.interleaved:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + rope.rotary_dim // 2
        angles = positions * (-frequency if inverse else frequency)
        cos = (angles.cos() * factor).to(keys.dtype)[:, None]
        sin = (angles.sin() * factor).to(keys.dtype)[:, None]
        rotated[..., first] = keys[..., first] * cos - keys[..., second] * sin
        rotated[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return rotated


def token_step(step: float, code: int) -> float:
    """With 8 significant bits, the nearest."""
    exact = step * 2.0 ** ((code - 128) / 4)
    unit = 2.0 ** (math.floor(math.log2(exact)) - 7)
    return round(exact / unit) * unit


def levels_and_back(values: torch.Tensor, plan: SidePlan, deviations: torch.Tensor) -> tuple[int, torch.Tensor]:
    """One token of a uniform plan: the code of its scale, and f64[kept components] as it decodes."""
    pairs = list(zip(values.tolist(), deviations.tolist(), plan.widths.tolist(), strict=True))
    wide = [(value, deviation) for value, deviation, width in pairs if width >= 8]
    counted = wide or [(value, deviation) for value, deviation, _ in pairs]
    energy = sum((value / deviation) ** 2 for value, deviation in counted)
    needed = math.sqrt(energy / len(counted)) * token_step(plan.step, 128)
    for value, width in zip(values.tolist(), plan.widths.tolist(), strict=True):
        needed = max(needed, abs(value) / (2 ** (width - 1) - 1))
    code = next(code for code in range(256) if token_step(plan.step, code) >= needed)
    step = token_step(plan.step, code)
    return code, torch.tensor([math.floor(value / step + 0.5) * step for value in values.tolist()], dtype=torch.float64)


def quantize_and_back(values: torch.Tensor, group: Group) -> torch.Tensor:
    """One group of one token, min/max range: f64[size] as it decodes."""
    low, high = values.min().item(), values.max().item()
    shift = float(np.float16(low))
    if shift > low:
        shift = float(np.nextafter(np.float16(low), np.float16(-np.inf)))
    wanted = (high - shift) / (2**group.width - 1)
    scale = float(np.float16(wanted))
    if scale < wanted:
        scale = float(np.nextafter(np.float16(wanted), np.float16(np.inf)))
    decoded = []
    for value in values.tolist():
        symbol = math.floor((value - shift) / scale + 0.5) if scale else 0
        decoded.append(shift + scale * min(max(symbol, 0), 2**group.width - 1))
    return torch.tensor(decoded, dtype=torch.float64)
