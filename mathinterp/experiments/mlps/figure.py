"""The map of an MLP scan: which layers' MLPs cost accuracy, per operation."""

from mathinterp.experiments.ablation_figure import draw_ablation
from mathinterp.experiments.adaptive.figure import draw_decisions
from mathinterp.experiments.adaptive.summary import decided
from mathinterp.experiments.figures import Figure
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """A point and an interval for each layer; of an adaptive scan, what was decided."""
    return draw_decisions(results, "MLP") if decided(results) else draw_ablation(results, "mlp")
