"""Faithfulness against the share of nodes that compute."""

from matplotlib.figure import Figure

from mathinterp.experiments.figures import panels
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """A line and its interval for each ordering; 1 is the whole model, 0 nothing."""
    curves = results.frame(
        """SELECT ordering, method, fraction, faithfulness, low, high FROM circuit_curves WHERE run_id = $run
           ORDER BY ordering DESC, fraction"""
    )
    figure, (axis,) = panels(1)
    for ordering, curve in curves.groupby("ordering", sort=False):
        (line,) = axis.plot(curve["fraction"], curve["faithfulness"], marker="o", ms=3, label=f"{ordering} scores")
        if curve["low"].notna().any():
            axis.fill_between(
                curve["fraction"], curve["low"].astype(float), curve["high"].astype(float), alpha=0.2,
                color=line.get_color(),
            )  # fmt: skip
    for level in (0, 1):
        axis.axhline(level, color="grey", lw=0.7)
    axis.set(xscale="log", xlabel="share of nodes in the circuit", ylabel="faithfulness")
    axis.set_title(f"circuits by {curves['method'].iloc[0]}" if len(curves) else "circuits")
    axis.legend(fontsize=8)
    return figure
