"""The mean norm against the layer."""

from matplotlib.figure import Figure

from mathinterp.experiments import Results
from mathinterp.experiments.figures import panels


def draw(results: Results) -> Figure:
    """One line."""
    means = results.frame("SELECT layer, mean FROM residual_norm_means WHERE run_id = $run ORDER BY layer")
    figure, (axis,) = panels(1)
    axis.plot(means["layer"], means["mean"], marker="o")
    axis.set(xlabel="layer", ylabel="mean norm at END")
    return figure
