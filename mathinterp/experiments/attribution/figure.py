"""The map of an attribution run: estimated effects of heads and MLPs, per operation."""

from mathinterp.experiments.charts import node_map, signed_colour
from mathinterp.experiments.figures import OPERATION, Figure, N, Tip, interval, titled
from mathinterp.experiments.paths import ShownNodes
from mathinterp.experiments.results import Results

CHANGE = "estimated change of the logit difference"


def draw(results: Results, shown: ShownNodes) -> Figure:
    """Layers by heads, coloured by the mean effect; MLPs are a last column."""
    rows = results.frame(
        """SELECT node, layer, head, operation, effect, low, high, n FROM node_attribution_effects
           WHERE run_id = $run AND node <> 'neuron' ORDER BY layer, head"""
    )
    (run,) = results.rows("SELECT parameters ->> 'method' AS method FROM runs WHERE run_id = $run")
    tips = [OPERATION, Tip("effect", CHANGE), interval("low", "high", "", "95 % interval of the estimate's mean"), N]
    return titled(
        node_map(rows, signed_colour("effect", rows["effect"], CHANGE, harm="low"), tips), results,
        f"Estimated effect of each node ({run['method']})",
        f"Map of layers by heads, MLPs in a last column, a panel for each operation, coloured by the {CHANGE}.",
    )  # fmt: skip
