"""Loss curves of gates as a picture (Fast KVzip figure 15)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from sglang_kvtc.distill.train import LossCurves


def plot_losses(curves: LossCurves, path: Path) -> None:
    """Draw the held-out loss of every layer against the step, and the last losses against their floor, to `path`."""
    # The canvas that needs no display, whatever the environment asks for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    over_steps, by_layer = figure.subplots(1, 2)
    num_layers = len(curves.floor)
    colours = matplotlib.colormaps["viridis"]
    for layer in range(num_layers):
        losses = [row[layer] for row in curves.held_out]
        over_steps.plot(curves.steps, losses, color=colours(layer / max(1, num_layers - 1)), linewidth=1)
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, max(1, num_layers - 1)), colours)
    figure.colorbar(scale, ax=over_steps, label="layer")
    over_steps.set(xlabel="step", ylabel="held-out cross-entropy [nats]", title="training")
    layers = range(num_layers)
    by_layer.bar(layers, curves.held_out[-1], label="held out")
    by_layer.bar(layers, curves.floor, label="entropy of the targets")
    by_layer.set(xlabel="layer", ylabel="cross-entropy [nats]", title=f"after {curves.steps[-1]:,} steps")
    by_layer.legend()
    figure.savefig(path, dpi=120)
