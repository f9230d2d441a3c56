"""The figure of an ablation scan: what each head or MLP costs, per operation, and how sure that is."""

import pandas as pd

from mathinterp.experiments.ablation_summary import COSTLY
from mathinterp.experiments.charts import intervals, node_map, signed_colour
from mathinterp.experiments.figures import LAYER, OPERATION, SURE, Figure, N, Q, Tip, interval, titled
from mathinterp.experiments.reach import noise_warnings, prompts_of, rough_warnings, unrankable
from mathinterp.experiments.results import Results

NATS = "logprob_change"
TIPS = [
    OPERATION,
    Tip("drop", "fall of accuracy", "points"), interval("drop_low", "drop_high", "points"),
    Q, SURE, Tip("accuracy", "accuracy left", "%"),
    Tip(NATS, "log-probability", "nats"), interval("logprob_low", "logprob_high", "nats", "its interval"), N,
]  # fmt: skip


def draw_ablation(results: Results, node: str) -> Figure:
    """By the fall of accuracy, or by the change of log-probability where accuracy ranks nothing.

    Heads are a map of layers by heads; MLPs points with their intervals.

    Args:
        node: "head" or "mlp".
    """
    rows = results.frame(
        f"""SELECT node, layer, head, operation, n, accuracy, drop, drop_low, drop_high, q_value AS q, sure,
                   logprob_change, logprob_low, logprob_high FROM ablation_effects
            WHERE run_id = $run AND node = '{node}' ORDER BY layer, head, operation"""
    )
    why = unrankable(results, f"{node}_effects")  # as in the summary
    fall = Tip(NATS, "change of log-probability", "nats") if "all" in why else Tip("drop", "fall of accuracy", "points")
    word, found = "head" if node == "head" else "MLP", rows[rows["operation"] == "all"]
    costly = int((100 * found["drop"] > COSTLY).sum())
    doubts = [f"accuracy ranks nothing in {name}: {reason}" for name, reason in why.items() if name != "all"]
    return titled(
        _map(rows, fall) if node == "head" else _points(rows, fall), results,
        f"What each {word} costs when it is ablated",
        f"The {fall.title} of each layer's {word}s, a panel for each operation."
        f" {costly} of {len(found)} {word}s cost more than {COSTLY} points of accuracy over all operations.",
        [*doubts, *noise_warnings(results), *rough_warnings(prompts_of(results))],
    )  # fmt: skip


def _map(rows: pd.DataFrame, fall: Tip) -> Figure:
    harm = "low" if fall.field == NATS else "high"
    return node_map(rows, signed_colour(fall.field, rows[fall.field], fall.title, fall.unit, harm=harm), TIPS)


def _points(rows: pd.DataFrame, fall: Tip) -> Figure:
    ends = ("logprob_low", "logprob_high") if fall.field == NATS else ("drop_low", "drop_high")
    layers = sorted(rows["layer"].unique(), reverse=True)
    rows = rows.drop(columns=["node", "head"]).assign(name="MLP " + rows["layer"].astype(str))
    tips = [Tip("name", "node", "text"), *TIPS]
    return intervals(rows, LAYER, fall, ends, tips, order=layers, panel="operation", rule=[0])
