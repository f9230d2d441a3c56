"""The map of head pairs: how far two heads together cost more, or less, than the sum of both."""

import numpy as np
from matplotlib.figure import Figure

from mathinterp.experiments.figures import panels
from mathinterp.experiments.head_pairs import ShownPairs
from mathinterp.experiments.results import Results


def draw(results: Results, shown: ShownPairs) -> Figure:
    """Heads by heads, coloured by the interaction in points, over all operations; given heads are one column."""
    rows = results.frame(
        """SELECT first, second, 100 * interaction AS points FROM head_pairs
           WHERE run_id = $run AND operation = 'all' ORDER BY layer, head, other_layer, other_head"""
    )
    names, others = list(dict.fromkeys(rows["first"])), list(dict.fromkeys(rows["second"]))
    grid = np.full((len(names), len(others)), np.nan)
    for first, second, points in rows.itertuples(index=False):
        grid[names.index(first), others.index(second)] = points
    bound = float(np.nanmax(np.abs(grid))) or 1.0
    figure, (axis,) = panels(1)
    image = axis.imshow(grid, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_xticks(range(len(others)), others, fontsize=7, rotation=90)
    figure.colorbar(image, ax=axis, label="interaction, points")
    return figure
