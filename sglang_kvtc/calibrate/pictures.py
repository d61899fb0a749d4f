"""Pictures of an artifact and of records that benchmarks wrote (KVTC figures 2 and 4)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_kvtc.artifact.schema import Artifact, SideBasis, SidePlan
from sglang_kvtc.calibrate.plans import ELEMENT_BITS
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side

Record = Mapping[str, Any]
_MEASURES = {"kl": "KL [nats]", "k": "share of the variance of K lost", "v": "share of the variance of V lost"}


def plot_spectrum(artifact: Artifact, path: Path) -> None:
    """Variance of the components of K and V in the artifact, and the share of all variance that the first ones hold."""
    figure, (falling, cumulative) = _figure()
    for side in Side:
        basis = artifact.basis(side)
        if basis is None:
            continue
        numbers = np.arange(1, len(basis.variances) + 1)
        falling.loglog(numbers, np.maximum(basis.variances, np.finfo(np.float32).tiny), label=side.name)
        held = np.cumsum(basis.variances, dtype=np.float64) / (basis.total_variance or 1.0)
        cumulative.semilogx(numbers, held, label=side.name)
    falling.set(xlabel="component", ylabel="variance", title="spectrum")
    cumulative.set(xlabel="components", ylabel="share of the variance", ylim=(0, 1), title="what the first ones hold")
    _finish(figure, (falling, cumulative), path)


def plot_allocation(artifact: Artifact, path: Path) -> None:
    """Bits that each plan gives to each component, of K and of V; in uniform plans what entropy coding should make."""
    figure, axes = _figure()
    for side, axis in zip(Side, axes, strict=True):
        for plan in artifact.plans:
            of_side = plan.side(side)
            stop = max((group.start + group.size for group in of_side.groups), default=0)
            bits = np.zeros(stop + 1)
            bits[of_side.columns] = _component_bits(of_side, artifact.basis(side))
            axis.step(np.arange(1, stop + 2), bits, where="post", label=f"{plan.target_ratio:g}x")
        axis.set(xlabel="component", ylabel="bits", xscale="log", title=f"bits of {side.name}")
    _finish(figure, axes, path)


def _component_bits(plan: SidePlan, basis: SideBasis | None) -> npt.NDArray[np.float64]:
    """Of every kept component: the width, or for a step the entropy of a Gaussian that is cut into such steps."""
    if basis is None or not plan.step:
        return plan.widths.astype(np.float64)
    deviations = np.sqrt(basis.variances[plan.columns].astype(np.float64))
    spread = math.sqrt(2 * math.pi * math.e) * deviations / plan.step
    bits: npt.NDArray[np.float64] = np.log2(np.maximum(spread, 1))
    return bits


def plot_held_out(artifact: Artifact, path: Path) -> None:
    """Held-out error of every layer, of K and of V, by plan."""
    figure, axes = _figure()
    for side, axis in zip(Side, axes, strict=True):
        for error in _held_out(artifact):
            layers = error[f"{side.name.lower()}_layers"]
            axis.plot(range(len(layers)), layers, marker=".", label=f"{error['target_ratio']:g}x")
        axis.set(xlabel="layer", ylabel="share of the variance lost", title=f"held-out error of {side.name}")
        axis.set_ylim(bottom=0)
    _finish(figure, axes, path)


def plot_stages(artifact: Artifact, path: Path) -> None:
    """What PCA cut, quantisation and entropy coding each contribute to the ratio of every plan (KVTC figure 2).

    The black line is the span of the ratios of single held-out sequences.
    """
    figure, (axis,) = _figure(1)
    rows = stage_ratios(artifact)
    places = range(len(rows))
    bottom = np.zeros(len(rows))
    for stage, colour in (("PCA", "tab:blue"), ("quantisation", "tab:orange"), ("entropy coding", "tab:green")):
        heights = np.log2([row[stage] for row in rows])
        axis.bar(places, heights, bottom=bottom, label=stage, color=colour)
        bottom += heights
    low, high = (np.log2([row[key] for row in rows]) for key in ("low", "high"))
    axis.vlines(places, low, high, color="black", linewidth=3)
    for place, height, row in zip(places, bottom, rows, strict=True):
        above = {"ha": "center", "va": "bottom", "xytext": (0, 6), "textcoords": "offset points"}
        axis.annotate(f"{row['ratio']:.1f}x", (place, height), **above)
    axis.set_xticks(places, [f"{row['target_ratio']:g}x" for row in rows])
    # Room for the legend above the bars.
    axis.set_ylim(top=1.4 * max(bottom, default=1))
    axis.set(xlabel="target ratio", ylabel="log2 of the ratio", title="ratio by stage")
    _finish(figure, (axis,), path)


def stage_ratios(artifact: Artifact) -> list[dict[str, float]]:
    """By plan: target_ratio; the factors PCA, quantisation and entropy coding, whose product is ratio; low and high.

    PCA: features over kept components. quantisation: 16 bits of each kept component over the bits of the plan. entropy
    coding: those bits over all stored bytes on held-out text, headers included.
    """
    geometry = artifact.geometry
    elements = sum(geometry.features(side) for side in Side)
    errors = {error["target_ratio"]: error for error in _held_out(artifact)}
    rows = []
    for plan in artifact.plans:
        kept = sum(len(plan.side(side).columns) for side in Side)
        bits = sum(plan.side(side).bits_per_token for side in Side)
        error = errors.get(plan.target_ratio)
        if error is None or not kept:
            continue
        rows.append(
            {
                "target_ratio": plan.target_ratio,
                "PCA": elements / kept,
                "quantisation": ELEMENT_BITS * kept / bits,
                "entropy coding": error["ratio"] * bits / (ELEMENT_BITS * elements),
                "ratio": error["ratio"],
                "low": error["ratio_range"][0],
                "high": error["ratio_range"][1],
            }
        )
    return rows


def read_records(files: Sequence[Path]) -> list[Record]:
    """The rows of files that `sglang-kvtc bench --json` wrote. Raises ConfigError, naming the file, for others."""
    records: list[Record] = []
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--records {file}: cannot be read as JSON: {error}") from error
        rows = content.get("rows") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"--records {file}: expected a record of `sglang-kvtc bench --json`, with a list of rows")
        records += rows
    return records


def plot_rate_distortion(records: Sequence[Record], path: Path) -> bool:
    """KL of the output against the ratio, a line per method. Rows need method, ratio and kl; False if none has them."""
    lines = _lines((row for row in records if "position" not in row), ("method",), "ratio", "kl")
    if not lines:
        return False
    figure, (axis,) = _figure(1)
    for name, points in lines.items():
        axis.loglog(*zip(*points, strict=True), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.set(xlabel="ratio, every stored byte counted", ylabel="KL [nats]", title="rate and distortion")
    _finish(figure, (axis,), path)
    return True


def plot_positions(records: Sequence[Record], path: Path) -> bool:
    """Error against position, a line per method and target ratio, from rows that have method and position.

    The error is kl, of the output, or k and v, shares of the variance lost; a picture for each that some row has. False
    if there are none.
    """
    found = {measure: _lines(records, ("method", "target_ratio"), "position", measure) for measure in _MEASURES}
    found = {measure: lines for measure, lines in found.items() if lines}
    if not found:
        return False
    figure, axes = _figure(len(found))
    for (measure, lines), axis in zip(found.items(), axes, strict=True):
        for name, points in lines.items():
            axis.semilogy(*zip(*points, strict=True), label=name)
        axis.set(xlabel="position", ylabel=_MEASURES[measure], title="error by position")
    _finish(figure, axes, path)
    return True


def _lines(
    rows: Iterable[Record], names: Sequence[str], x_key: str, y_key: str
) -> dict[str, list[tuple[float, float]]]:
    """Points of the rows that have all of these keys, by what `names` say, in order of x."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if {"method", x_key, y_key} <= row.keys():
            name = " ".join(str(row[key]) if key == "method" else f"{row[key]:g}x" for key in names if row.get(key))
            lines.setdefault(name, []).append((float(row[x_key]), float(row[y_key])))
    return {name: sorted(points) for name, points in lines.items()}


def _held_out(artifact: Artifact) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(artifact.provenance.get("held_out_error", "[]"))
    return found


def _figure(num_axes: int = 2) -> tuple[Any, Any]:
    # The canvas that needs no display, whatever the environment asks for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * num_axes, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def _finish(figure: Any, axes: Sequence[Any], path: Path) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
