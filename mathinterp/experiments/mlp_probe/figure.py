"""The curves of an MLP probe: cosine of the MLP's output with the unembedding, against the layer."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.experiments.figures import panel_per_operation
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """A line each for operand A, operand B and the answer, with 95 % intervals."""
    rows = results.frame(
        """SELECT layer, operation, target, mlp_out, mlp_out_low, mlp_out_high FROM mlp_probe_curve
           WHERE run_id = $run ORDER BY layer"""
    )
    return panel_per_operation(rows, _lines)


def _lines(axis: Axes, rows: pd.DataFrame) -> None:
    for target, line in rows.groupby("target"):
        drawn = axis.plot(line["layer"], line["mlp_out"], marker="o", markersize=3, label=str(target).upper())[0]
        axis.fill_between(line["layer"], line["mlp_out_low"], line["mlp_out_high"], alpha=0.2, color=drawn.get_color())
    axis.set(xlabel="layer", ylabel="cosine with the unembedding")
