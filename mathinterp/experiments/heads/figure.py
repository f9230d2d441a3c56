"""The map of a head scan: which heads cost accuracy, per operation."""

from matplotlib.figure import Figure

from mathinterp.experiments.figures import effect_map
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """Layers by heads, coloured by the change of accuracy in points."""
    effects = results.frame(
        "SELECT 'head' AS node, layer, head, operation, -100 * drop AS effect FROM head_effects WHERE run_id = $run"
    )
    return effect_map(effects, "change of accuracy, points")
