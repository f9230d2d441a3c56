"""The map of a head scan: which heads cost accuracy, per operation."""

from mathinterp.experiments.ablation_figure import draw_ablation
from mathinterp.experiments.adaptive.figure import draw_decisions
from mathinterp.experiments.adaptive.summary import decided
from mathinterp.experiments.figures import Figure
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """Layers by heads, coloured by the fall of accuracy; of an adaptive scan, by what was decided."""
    return draw_decisions(results, "head") if decided(results) else draw_ablation(results, "head")
