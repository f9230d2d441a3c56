"""The bars of an attention scan: what the strongest heads look at from END (paper B's Figure 5)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.experiments.attention import ShownHeads
from mathinterp.experiments.figures import panel_per_operation
from mathinterp.experiments.results import Results

STACKED = ("bos", "operand_a", "operator", "operand_b", "equals", "other")  # token types of arithmetic, from below
RANKING = ("operand_a", "operand_b", "operator")  # those whose weight chooses the heads
PLAIN = ("bos", "first", "other")  # those whose weight never does


def draw(results: Results, shown: ShownHeads) -> Figure:
    """Mean weight of END's attention by token type, of the heads that look at operands and operator most."""
    rows = results.frame(
        """SELECT layer || '.' || head AS name, operation, token_type, mass FROM attention_by_type
           WHERE run_id = $run"""
    )
    kinds = [*(kind for kind in STACKED if kind in set(rows["token_type"]))]
    kinds += sorted(set(rows["token_type"]) - set(kinds))
    ranking = RANKING if set(RANKING) & set(kinds) else [kind for kind in kinds if kind not in PLAIN]
    looking = rows[(rows["operation"] == "all") & rows["token_type"].isin(ranking)]
    chosen = looking.groupby("name")["mass"].sum().sort_values(ascending=False).index[: shown.top]
    return panel_per_operation(rows, lambda axis, part: _bars(axis, part, chosen, kinds), legend=7)


def _bars(axis: Axes, rows: pd.DataFrame, names: pd.Index, kinds: Sequence[str]) -> None:
    table = rows.pivot(index="name", columns="token_type", values="mass")
    table = table.reindex(index=names, columns=list(kinds)).fillna(0.0)
    bottom = np.zeros(len(table))
    for kind in kinds:
        axis.bar(table.index, table[kind], bottom=bottom, label=kind)
        bottom += table[kind].to_numpy()
    axis.set(ylabel="attention from END", ylim=(0, 1.02))
    axis.tick_params(axis="x", labelrotation=90)
