"""The mean norm against the layer."""

from mathinterp.experiments import Results
from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import LAYER, Figure, N, Tip, titled


def draw(results: Results) -> Figure:
    """One line."""
    means = results.frame("SELECT layer, mean, n FROM residual_norm_means WHERE run_id = $run ORDER BY layer")
    mean = Tip("mean", "mean norm at END")
    figure = curves(means, LAYER, mean, None, [LAYER, mean, N], panel=None)
    return titled(figure, results, "Norm of the residual stream", "A curve of the mean norm at END, layer by layer.")
