"""Scores in a byte each, to be kept with the compressed tokens they belong to.

Scores rank KV pairs, and most are small: the code is logarithmic, STEPS to an octave, from 1 down to 2^-15.94.
"""

from __future__ import annotations

import torch

STEPS = 16


def encode_scores(scores: torch.Tensor) -> torch.Tensor:
    """Codes u8 of scores f32 or f16 in [0, 1], of any shape. NaN, of which nothing is known, counts as 1."""
    octaves = scores.float().nan_to_num(nan=1.0).clamp(0, 1).log2()
    return (octaves * STEPS + 255).round_().clamp_(0, 255).to(torch.uint8)


def decode_scores(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores of codes u8: 2.2% off at most, before they are rounded to `dtype`; all smaller than 2^-15.94 are that."""
    return ((codes.float() - 255) / STEPS).exp2_().to(dtype)
