"""The curves of a knock-out: accuracy against the number of heads that are out."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.experiments.figures import panel_per_operation
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """Accuracy (%) against k: effect-rank with its interval, random ranks as the range over seeds."""
    curve = results.frame(
        """SELECT ranking, k, operation, 100 * accuracy AS accuracy, 100 * low AS low, 100 * high AS high
           FROM knockout_curve WHERE run_id = $run AND ranking = 'effect'
           UNION ALL
           SELECT ranking, k, operation, 100 * accuracy, 100 * lowest, 100 * highest
           FROM knockout_bands WHERE run_id = $run AND ranking <> 'effect' ORDER BY k"""
    )
    return panel_per_operation(curve, _curves)


def _curves(axis: Axes, rows: pd.DataFrame) -> None:
    for ranking, curve in rows.groupby("ranking"):
        name = f"{str(ranking).replace('_', ', ')}-rank"
        line = axis.plot(curve["k"], curve["accuracy"], marker="o", markersize=3, label=name)[0]
        axis.fill_between(curve["k"], curve["low"], curve["high"], alpha=0.2, color=line.get_color())
    ks = sorted(rows["k"].unique())
    axis.set(xlabel="heads knocked out", ylabel="accuracy, %", ylim=(0, 102))
    axis.set_xscale("symlog", base=2, linthresh=1)
    axis.set_xticks(ks, [str(k) for k in ks], fontsize=7)
