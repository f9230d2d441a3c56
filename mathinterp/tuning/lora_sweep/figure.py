"""The curve of a layer sweep: accuracy against the layer that has the LoRA (paper A, section 5)."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.experiments.figures import panel_per_operation, whole_numbers
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """Accuracy (%) with its 95 % interval; the original model as a dashed line."""
    curve = results.frame(
        """SELECT layer, operation, 100 * baseline_accuracy AS original, 100 * accuracy AS accuracy, 100 * low AS low,
               100 * high AS high FROM lora_sweep_curve WHERE run_id = $run ORDER BY layer"""
    )
    return panel_per_operation(curve, _line)


def _line(axis: Axes, rows: pd.DataFrame) -> None:
    axis.plot(rows["layer"], rows["accuracy"], marker="o", markersize=3, label="LoRA in this layer")
    axis.fill_between(rows["layer"], rows["low"], rows["high"], alpha=0.2)
    axis.axhline(rows["original"].iloc[0], linestyle="--", color="grey", label="original")
    axis.set(xlabel="layer", ylabel="accuracy, %", ylim=(0, 102))
    whole_numbers(axis.xaxis)
