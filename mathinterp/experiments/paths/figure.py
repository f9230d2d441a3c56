"""The map of a path scan: which heads and MLPs carry the answer, per operation (the form of paper B's Figure 2)."""

from matplotlib.figure import Figure

from mathinterp.experiments.figures import effect_map
from mathinterp.experiments.paths import ShownNodes
from mathinterp.experiments.results import Results


def draw(results: Results, shown: ShownNodes) -> Figure:
    """Layers by heads, coloured by 100 times the mean effect; MLPs are a last column."""
    effects = results.frame(
        "SELECT node, layer, head, operation, 100 * mean AS effect FROM path_effects WHERE run_id = $run"
    )
    return effect_map(effects, "effect of patching, %")
