"""The figure of a league: how far each method agrees with exact patching, measure by measure."""

import pandas as pd

from mathinterp.errors import UserError
from mathinterp.experiments.charts import intervals
from mathinterp.experiments.figures import NO_ROWS, Figure, N, Tip, interval, titled
from mathinterp.experiments.league.summary import COLUMNS, OF_CIRCUITS, SHOWN
from mathinterp.experiments.results import Results

WORDS = {
    "spearman": "Spearman, with sign", "kendall": "Kendall, with sign", "spearman_absolute": "Spearman, of sizes",
    "overlap_5": "overlap of the first 5", "overlap_10": "overlap of the first 10",
    "overlap_32": "overlap of the first 32", "prompt_correlation": "correlation on one prompt",
    "cpr": "CPR of circuits (larger is better)", "cmd": "CMD of circuits (smaller is better)",
}  # fmt: skip


def draw(results: Results) -> Figure:
    """Methods by measures: a panel for each measure, a point with its interval for each method."""
    found = results.frame(
        f"SELECT method, {COLUMNS}, seconds, n FROM method_league WHERE run_id = $run ORDER BY spearman_absolute DESC"
    )
    if found.empty:
        raise UserError(NO_ROWS)
    exact = found[found["method"] == "exact"]
    parts = []
    for measure in SHOWN:
        columns = {measure: "value", f"{measure}_low": "low", f"{measure}_high": "high"}
        part = found[["method", *columns, "seconds", "n"]].rename(columns=columns).assign(measure=WORDS[measure])
        known = exact[measure].dropna() if measure in OF_CIRCUITS else exact[measure].iloc[:0]
        part["exact"] = known.iloc[0] if len(known) else None
        parts.append(part[(part["method"] != "exact") & part["value"].notna()])
    rows = pd.concat([part for part in parts if len(part)])
    tips = [
        Tip("method", "method", "text"), Tip("measure", "measure", "text"), Tip("value", "value"),
        interval("low", "high", ""), Tip("exact", "of exact effects"), Tip("seconds", "seconds"), N,
    ]  # fmt: skip
    order = [method for method in found["method"] if method != "exact"]
    figure = intervals(
        rows, Tip("method", ""), Tip("value", "value"), ("low", "high"), tips, order=order, panel="measure",
        rule="exact",
    )  # fmt: skip
    return titled(
        figure.resolve_scale(x="independent"), results, "Methods against exact patching (dashed: exact effects)",
        "A panel for each measure of agreement, a point with its 95 % interval for each method."
        f" By rank correlation of sizes the first is {order[0] if order else 'none'}.",
        label="league",
    )  # fmt: skip
