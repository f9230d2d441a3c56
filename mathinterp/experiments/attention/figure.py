"""The bars of an attention scan: what the strongest heads look at from END (paper B's Figure 5)."""

import altair as alt

from mathinterp.experiments.attention import ShownHeads
from mathinterp.experiments.charts import names_legend
from mathinterp.experiments.figures import (
    OPERATION,
    WIDTH,
    Figure,
    N,
    Tip,
    axis,
    data_of,
    interval,
    operations_of,
    panels,
    titled,
    with_tips,
)  # fmt: skip
from mathinterp.experiments.results import Results

STACKED = ("bos", "operand_a", "operator", "operand_b", "equals", "other")  # token types of arithmetic, from the left
RANKING = ("operand_a", "operand_b", "operator")  # those whose weight chooses the heads
PLAIN = ("bos", "first", "other")  # those whose weight never does
TIPS = [
    Tip("name", "head", "text"), OPERATION, Tip("token_type", "token", "text"), Tip("mass", "attention", "%"),
    interval("low", "high", "%"), Tip("argmax_share", "prompts where it is largest", "%"),
    Tip("tokens", "tokens of the kind"), N,
]  # fmt: skip


def draw(results: Results, shown: ShownHeads) -> Figure:
    """Mean weight of END's attention by token type, of the heads that look at operands and operator most."""
    rows = results.frame(
        """SELECT layer || '.' || head AS name, operation, token_type, mass, low, high, argmax_share, tokens, n
           FROM attention_by_type WHERE run_id = $run"""
    )
    operations = operations_of(rows)
    kinds = [kind for kind in STACKED if kind in set(rows["token_type"])]
    kinds += sorted(set(rows["token_type"]) - set(kinds))
    ranking = RANKING if set(RANKING) & set(kinds) else [kind for kind in kinds if kind not in PLAIN]
    looking = rows[(rows["operation"] == "all") & rows["token_type"].isin(ranking)]
    chosen = list(looking.groupby("name")["mass"].sum().sort_values(ascending=False).index[: shown.top])
    rows = rows[rows["name"].isin(chosen)]
    rows = rows.assign(place=rows["token_type"].map(kinds.index))
    bars = alt.Chart(data_of(rows)).mark_bar().encode(
        y=alt.Y("name:N", sort=chosen, title="head"),
        x=alt.X("mass:Q", stack="zero", scale=alt.Scale(domain=[0, 1]), axis=axis("%"), title="attention from END"),
        color=alt.Color("token_type:N", sort=kinds, legend=names_legend("token")),
        order="place:Q",
    ).properties(width=WIDTH - 50, height=max(40, 18 * len(chosen)))  # fmt: skip
    return titled(
        panels(with_tips(bars, TIPS), operations), results, "What heads look at from the last token",
        f"Stacked bars of attention by kind of token for the {len(chosen)} heads that look at"
        f" {', '.join(kind.replace('_', ' ') for kind in ranking)} most, a panel for each operation.",
    )  # fmt: skip
