"""Statistics of random rows with a falling spectrum, as a calibration would have collected them."""

from __future__ import annotations

import torch

from sglang_kvtc.calibrate.fit import SideFit, fit_side
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.statistics import SideStatistics
from sglang_kvtc.types import ModelGeometry, Side

GEOMETRY = ModelGeometry(num_layers=4, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype="bfloat16")


def rows_of(side: Side, count: int = 900) -> torch.Tensor:
    """f32[count, p]: correlated across all features, with a mean."""
    num_features = GEOMETRY.features(side)
    generator = torch.Generator().manual_seed(int(side))
    mixing = torch.linalg.qr(torch.randn(num_features, num_features, generator=generator)).Q
    spectrum = torch.arange(1, num_features + 1) ** -(0.8 if side is Side.K else 0.4)
    return torch.randn(count, num_features, generator=generator) * spectrum @ mixing + 2.0


def statistics_of(rows: torch.Tensor, pca_rows: int | None = None) -> SideStatistics:
    statistics = SideStatistics.empty(rows.shape[1], pca_rows, seed=0, device=torch.device("cpu"))
    statistics.moments.add(rows[200:])
    statistics.allocation.add(rows[:200])
    return statistics


def fitted(statistics: SideStatistics, side: Side = Side.K, **changes: object) -> SideFit:
    settings: dict[str, object] = {"rank": 10_000, "seed": 0, "device": torch.device("cpu")} | changes
    return fit_side(side, statistics, progress=SilentProgress(), **settings)
