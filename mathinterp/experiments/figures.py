"""What figures share: panels side by side, one per operation, and maps of layers by heads.

Knows matplotlib's objects, not its windows: nothing is shown, ``save`` writes PNG and SVG.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from mathinterp.errors import UserError
from mathinterp.local_files import whole_file

PANEL = 3.2  # inches, width and height of one panel


def operations_of(rows: pd.DataFrame) -> list[str]:
    """The operations in the rows, 'all' first; raises UserError if there are no rows."""
    if rows.empty:
        raise UserError("the run has no rows to draw yet; the same command computes what is missing")
    return sorted(rows["operation"].unique(), key=lambda operation: (operation != "all", operation))


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels in a row."""
    figure = Figure(figsize=(PANEL * count + 0.8, PANEL), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


def panel_per_operation(rows: pd.DataFrame, draw: Callable[[Axes, pd.DataFrame], object], legend: int = 8) -> Figure:
    """``draw`` the rows of each operation into a panel of its own; the first one has the legend."""
    operations = operations_of(rows)
    figure, axes = panels(len(operations))
    for axis, operation in zip(axes, operations, strict=True):
        draw(axis, rows[rows["operation"] == operation])
        axis.set_title(operation)
    axes[0].legend(fontsize=legend)
    return figure


def whole_numbers(*axes: object) -> None:
    """Ticks at whole numbers alone: layers and heads."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))  # type: ignore[attr-defined]


def effect_map(effects: pd.DataFrame, label: str) -> Figure:
    """Layers by heads, coloured by ``effect``, a panel an operation; MLPs are a last column.

    Args:
        effects: columns node ("head" or "mlp"), layer, head, operation, effect.
        label: of the colours.
    """
    operations = operations_of(effects)
    bound = float(effects["effect"].abs().max()) or 1.0
    figure, axes = panels(len(operations))
    image = None
    for axis, operation in zip(axes, operations, strict=True):
        grid = node_grid(effects[effects["operation"] == operation], "effect")
        image = axis.imshow(grid, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto", origin="lower")
        axis.set(title=operation, xlabel="head", ylabel="layer")
        whole_numbers(axis.xaxis, axis.yaxis)
        if (effects["node"] == "mlp").any():
            axis.set_xlabel("head (last column: MLP)")
    assert image is not None
    figure.colorbar(image, ax=list(axes), label=label)
    return figure


def node_grid(rows: pd.DataFrame, column: str) -> np.ndarray:
    """``column`` as layers x heads, and one more for MLPs where there are any; NaN where nothing was measured."""
    heads, mlps = rows[rows["node"] == "head"], rows[rows["node"] == "mlp"]
    n_heads = int(heads["head"].max()) + 1 if len(heads) else 0
    grid = np.full((int(rows["layer"].max()) + 1, n_heads + (1 if len(mlps) else 0)), np.nan)
    grid[heads["layer"].astype(int), heads["head"].astype(int)] = heads[column]
    if len(mlps):
        grid[mlps["layer"].astype(int), -1] = mlps[column]
    return grid


def _write_plainly(figure: Figure) -> None:
    """A "$" in tokens and names is a dollar, no formula; the powers of ten along an axis that counts in them stay."""
    powers = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if axis.get_scale() != "linear"
        for label in (*axis.get_majorticklabels(), *axis.get_minorticklabels())
    }
    for text in figure.findobj(Text):
        text.set_parse_math(text in powers)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path``.png and ``path``.svg, never through a link; returns both."""
    _write_plainly(figure)
    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for file in written:
        with whole_file(file) as temporary:
            figure.savefig(temporary, dpi=150)
    return written
