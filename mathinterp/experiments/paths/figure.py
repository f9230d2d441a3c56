"""The map of a path scan: which heads and MLPs carry the answer, per operation (the form of paper B's Figure 2)."""

from mathinterp.experiments.adaptive.figure import draw_decisions
from mathinterp.experiments.adaptive.summary import decided
from mathinterp.experiments.charts import node_map, signed_colour
from mathinterp.experiments.figures import OPERATION, SURE, Figure, N, Q, Tip, interval, titled
from mathinterp.experiments.paths import ShownNodes
from mathinterp.experiments.paths.summary import doubts
from mathinterp.experiments.results import Results

UNITS = {
    "logit": ("change of the logit", "%"),
    "centred": ("change of the centred logit", "%"),
    "probability": ("change of the probability", "points"),
    "logprob": ("change of the log-probability", "nats"),
}  # of the run's measure


def draw(results: Results, shown: ShownNodes) -> Figure:
    """Layers by heads, coloured by the mean effect, a dot on key heads; MLPs are a last column.

    Of an adaptive scan: what was decided.
    """
    (run,) = results.rows("SELECT parameters ->> 'effect' AS effect FROM runs WHERE run_id = $run")
    title, unit = UNITS[run["effect"]]
    if decided(results):
        return draw_decisions(results, "node", unit)
    rows = results.frame(
        """SELECT node, layer, head, operation, mean AS effect, low, high, q_value AS q, sure,
                  node = 'head' AND key AS key, rank, logprob_change, n
           FROM path_effects WHERE run_id = $run ORDER BY layer, head"""
    )
    tips = [
        OPERATION, Tip("effect", title, unit), interval("low", "high", unit), Q, SURE, Tip("key", "key head", "text"),
        Tip("rank", "rank", "whole"), Tip("logprob_change", "log-probability", "nats"), N,
    ]  # fmt: skip
    keys = int(((rows["operation"] == "all") & rows["key"].eq(True)).sum())
    return titled(
        node_map(rows, signed_colour("effect", rows["effect"], title, unit, harm="low"), tips, dot="key"), results,
        "What patching the path of each node changes (dot: key head)",
        f"Map of layers by heads, MLPs in a last column, a panel for each operation, coloured by the {title}."
        f" {keys} key heads over all operations.",
        doubts(results),
    )  # fmt: skip
