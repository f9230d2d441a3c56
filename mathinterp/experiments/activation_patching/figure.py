"""The map of activation patching: layers by kinds of tokens, a panel for each site and direction."""

import pandas as pd

from mathinterp.experiments.activation_patching import ShownPatches
from mathinterp.experiments.activation_patching.summary import doubts
from mathinterp.experiments.activation_patching.tables import DIRECTIONS, SITES
from mathinterp.experiments.charts import heat, signed_colour
from mathinterp.experiments.figures import LAYER, Figure, N, Tip, interval, titled
from mathinterp.experiments.results import Results
from mathinterp.prompts.token_types import TOKEN_TYPES

KINDS = (*TOKEN_TYPES, "end")


def draw(results: Results, shown: ShownPatches) -> Figure:
    """Coloured by the fraction of the gap that a patch closes, over all operations."""
    rows = results.frame(
        """SELECT site || ', ' || direction AS panel, site, direction, layer, token_type, fraction, fraction_low AS low,
                  fraction_high AS high, change, n
           FROM patching_effects WHERE run_id = $run AND operation = 'all' AND measure = $measure ORDER BY layer""",
        measure=shown.measure,
    )
    order = [f"{site}, {direction}" for direction in DIRECTIONS for site in SITES]
    rows = rows.sort_values("panel", key=lambda names: names.map(order.index), kind="stable")
    fraction = Tip("fraction", "share of the gap closed", "%")
    tips = [
        Tip("site", "site", "text"), Tip("direction", "direction", "text"), LAYER, Tip("token_type", "token", "text"),
        fraction, interval("low", "high", "%"), Tip("change", f"change of {shown.measure}"), N,
    ]  # fmt: skip
    last = int(rows["layer"].max()) if len(rows) else 0
    kinds = [kind for kind in KINDS if (rows["token_type"] == kind).any()]
    colour = signed_colour("fraction", pd.concat([rows["fraction"], pd.Series([1.0])]), fraction.title, "%")
    figure = heat(
        rows, Tip("token_type", "token"), LAYER, colour, tips, panel="panel", angle=-45,
        across=kinds, up=range(last + 1),
    )  # fmt: skip
    return titled(
        figure, results, f"Where the answer's {shown.measure} can be patched in",
        "Maps of layers by kinds of tokens, one for each site and direction, coloured by the share of the gap between"
        " the two sentences that patching this token closes, over all operations.",
        doubts(results, shown),
    )  # fmt: skip
