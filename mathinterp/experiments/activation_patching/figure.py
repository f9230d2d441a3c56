"""The map of activation patching: layers by kinds of tokens, a panel for each site and direction."""

import numpy as np
from matplotlib.figure import Figure

from mathinterp.errors import UserError
from mathinterp.experiments.activation_patching import ShownPatches
from mathinterp.experiments.activation_patching.tables import DIRECTIONS, SITES
from mathinterp.experiments.figures import PANEL, whole_numbers
from mathinterp.experiments.results import Results
from mathinterp.prompts.token_types import TOKEN_TYPES

KINDS = (*TOKEN_TYPES, "end")


def draw(results: Results, shown: ShownPatches) -> Figure:
    """Coloured by the fraction of the gap that a patch closes, over all operations; directions are rows of panels."""
    rows = results.frame(
        """SELECT site, direction, layer, token_type, fraction FROM patching_effects
           WHERE run_id = $run AND operation = 'all' AND measure = $measure""",
        measure=shown.measure,
    )
    if rows.empty:
        raise UserError("the run has no rows to draw yet; the same command computes what is missing")
    sites = [site for site in SITES if (rows["site"] == site).any()]
    directions = [direction for direction in DIRECTIONS if (rows["direction"] == direction).any()]
    kinds = [kind for kind in KINDS if (rows["token_type"] == kind).any()]
    figure = Figure(figsize=(PANEL * len(sites) + 1, PANEL * len(directions)), layout="constrained")
    axes = figure.subplots(len(directions), len(sites), squeeze=False)
    bound = max(1.0, float(np.nanmax(np.abs(rows["fraction"]))))
    for axis, (direction, site) in zip(axes.flat, ((d, s) for d in directions for s in sites), strict=True):
        own = rows[(rows["site"] == site) & (rows["direction"] == direction)]
        grid = np.full((int(rows["layer"].max()) + 1, len(kinds)), np.nan)
        grid[own["layer"].astype(int), [kinds.index(kind) for kind in own["token_type"]]] = own["fraction"]
        image = axis.imshow(grid, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", origin="lower")
        axis.set(title=f"{site}, {direction}", ylabel="layer")
        axis.set_xticks(range(len(kinds)), kinds, rotation=45, fontsize=7)
        whole_numbers(axis.yaxis)
    figure.colorbar(image, ax=list(axes.flat), label=f"fraction of the gap in {shown.measure}")
    return figure
