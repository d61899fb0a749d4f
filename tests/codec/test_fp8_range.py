from __future__ import annotations

import numpy as np
import pytest
import torch
from bitstream import plain_reader
from codec.toy_model import GEOMETRY, make_artifact, round_trip

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import KVChunk


@pytest.mark.parametrize("spread", [1e-8, 1e-4, 1.0, 6e4, 3e38])
def test_a_num_02_fp8_scales_of_any_range_are_finite_and_errors_half_a_step(spread: float) -> None:
    noise = torch.Generator().manual_seed(2)
    sizes = (GEOMETRY.head_dim, GEOMETRY.v_head_dim)
    keys, values = (
        ((2 * torch.rand(GEOMETRY.num_layers, 9, GEOMETRY.num_kv_heads, size, generator=noise) - 1) * spread).bfloat16()
        for size in sizes
    )
    artifact, chunk = make_artifact(), KVChunk(keys, values, 5)
    encoded = KVCodec(artifact, CodecConfig()).encode(chunk, FrameKind.FP8)
    assert encoded.kind is FrameKind.FP8
    plain = plain_reader.read(encoded.frame)
    for side, original, found in zip("KV", (keys, values), round_trip(artifact, chunk, FrameKind.FP8), strict=True):
        scales = np.frombuffer(plain.sections[f"{side}_SCALES"], "<f4").reshape(GEOMETRY.num_layers, -1)
        assert np.isfinite(scales).all() and (scales >= np.finfo(np.float32).tiny).all()
        decoded = plain_reader.fp8_values(plain, side, tuple(original.shape))
        # E4M3: 2^-3 of the power of two below, and one step of 2^-9 for the smallest; the scale is rounded to f32.
        unit = original.double().numpy() / scales[:, None, :, None]
        step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(unit), 2.0**-6))), -6) - 3)
        error = np.abs(decoded - original.double().numpy())
        assert (error <= step * scales[:, None, :, None] / 2 * (1 + 2.0**-20)).all()
        assert bool(torch.isfinite(found).all())
