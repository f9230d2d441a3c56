"""Figures of finished runs, drawn from the stored tables alone: nothing is computed again.

- effect_maps: layer by head, one panel an operation (the form of paper B's Figure 2; MLPs as a column of their own);
- knockout_curves: accuracy against the number of heads knocked out, effect-rank against random-rank;
- attention_bars: what the strongest heads look at from END (paper B's Figure 5);
- probing_lines: cosine with the operands' and the answer's unembedding, layer by layer;
- sweep_curves: accuracy against the layer that has the LoRA (paper A, section 5);

Each returns a matplotlib figure; ``save`` writes PNG and SVG.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mathinterp.errors import UserError
from mathinterp.store import Store

PANEL = 3.2  # inches, width and height of one panel
TOKEN_TYPES = ("bos", "operand_a", "operator", "operand_b", "equals", "other")


def effect_maps(store: Store, run_id: str) -> Figure:
    """Effects of a head scan (accuracy drop, points) or a path scan (relative change of the logit, %).

    Raises UserError for a run of another scan.
    """
    scan = _scan_of(store, run_id)
    if scan == "heads":
        query = "SELECT 'head' AS node, layer, head, operation, -100 * drop AS effect FROM head_effects"
        label = "change of accuracy, points"
    elif scan == "paths":
        query = "SELECT node, layer, head, operation, 100 * mean AS effect FROM path_effects"
        label = "effect of patching, %"
    else:
        raise UserError(f"run {run_id} is a scan of {scan}; effect maps are drawn of heads and paths")
    effects = store.dataframe(f"{query} WHERE run_id = '{run_id}'")
    operations = _operations(effects)
    bound = float(effects["effect"].abs().max()) or 1.0
    figure, axes = _panels(len(operations))
    image = None
    for axis, operation in zip(axes, operations, strict=True):
        grid = _grid(effects[effects["operation"] == operation])
        image = axis.imshow(grid, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto", origin="lower")
        axis.set(title=operation, xlabel="head", ylabel="layer")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(MaxNLocator(integer=True))
        if (effects["node"] == "mlp").any():
            axis.set_xlabel("head (last column: MLP)")
    assert image is not None
    figure.colorbar(image, ax=list(axes), label=label)
    return figure


def _grid(effects: pd.DataFrame) -> np.ndarray:
    """Layers x heads, and one more column for MLPs where there are any; NaN where nothing was measured."""
    heads = effects[effects["node"] == "head"]
    mlps = effects[effects["node"] == "mlp"]
    n_heads = int(heads["head"].max()) + 1 if len(heads) else 0
    grid = np.full((int(effects["layer"].max()) + 1, n_heads + (1 if len(mlps) else 0)), np.nan)
    grid[heads["layer"].astype(int), heads["head"].astype(int)] = heads["effect"]
    if len(mlps):
        grid[mlps["layer"].astype(int), -1] = mlps["effect"]
    return grid


def knockout_curves(store: Store, run_id: str) -> Figure:
    """Accuracy (%) against k heads out: effect-rank with its interval, random ranks as the range over seeds."""
    curve = store.dataframe(
        f"SELECT ranking, k, operation, 100 * accuracy AS accuracy, 100 * low AS low, 100 * high AS high"
        f" FROM knockout_curve WHERE run_id = '{run_id}' AND ranking = 'effect' UNION ALL"
        f" SELECT ranking, k, operation, 100 * accuracy, 100 * lowest, 100 * highest"
        f" FROM knockout_bands WHERE run_id = '{run_id}' AND ranking <> 'effect' ORDER BY k"
    )
    if curve.empty:
        raise UserError(f"run {run_id} has no knock-out curve; make one with 'mathinterp knockout'")
    operations = _operations(curve)
    figure, axes = _panels(len(operations))
    for axis, operation in zip(axes, operations, strict=True):
        for ranking, rows in curve[curve["operation"] == operation].groupby("ranking"):
            _draw_ranking(axis, str(ranking), rows)
        axis.set(title=operation, xlabel="heads knocked out", ylabel="accuracy, %", ylim=(0, 102))
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_xticks(sorted(curve["k"].unique()), [str(k) for k in sorted(curve["k"].unique())], fontsize=7)
    axes[0].legend(fontsize=8)
    return figure


def _draw_ranking(axis: Axes, ranking: str, rows: pd.DataFrame) -> None:
    line = axis.plot(rows["k"], rows["accuracy"], marker="o", markersize=3, label=f"{ranking.replace('_', ', ')}-rank")[
        0
    ]
    axis.fill_between(rows["k"], rows["low"], rows["high"], alpha=0.2, color=line.get_color())


def attention_bars(store: Store, run_id: str, heads: int = 8) -> Figure:
    """Mean END-row attention mass by token type, of the run's heads that look at operands and operator most."""
    rows = store.dataframe(
        f"SELECT layer, head, operation, token_type, mass FROM attention_by_type WHERE run_id = '{run_id}'"
    )
    if rows.empty:
        raise UserError(f"run {run_id} has no attention rows; make them with 'mathinterp scan attention'")
    rows["name"] = rows["layer"].astype(str) + "." + rows["head"].astype(str)
    looking = rows[(rows["operation"] == "all") & rows["token_type"].isin(["operand_a", "operand_b", "operator"])]
    chosen = looking.groupby("name")["mass"].sum().sort_values(ascending=False).index[:heads]
    operations = _operations(rows)
    figure, axes = _panels(len(operations))
    for axis, operation in zip(axes, operations, strict=True):
        table = (
            rows[rows["operation"] == operation]
            .pivot(index="name", columns="token_type", values="mass")
            .reindex(index=chosen, columns=list(TOKEN_TYPES))
            .fillna(0.0)
        )
        bottom = np.zeros(len(table))
        for kind in TOKEN_TYPES:
            axis.bar(table.index, table[kind], bottom=bottom, label=kind)
            bottom += table[kind].to_numpy()
        axis.set(title=operation, ylabel="attention from END", ylim=(0, 1.02))
        axis.tick_params(axis="x", labelrotation=90)
    axes[0].legend(fontsize=7)
    return figure


def probing_lines(store: Store, run_id: str) -> Figure:
    """Cosine of the MLP's output with the unembedding of operand A, operand B and the answer, against the layer."""
    rows = store.dataframe(
        f"SELECT layer, operation, target, mlp_out, mlp_out_low, mlp_out_high FROM mlp_probe_curve"
        f" WHERE run_id = '{run_id}' ORDER BY layer"
    )
    if rows.empty:
        raise UserError(f"run {run_id} has no probing rows; make them with 'mathinterp scan probe'")
    operations = _operations(rows)
    figure, axes = _panels(len(operations))
    for axis, operation in zip(axes, operations, strict=True):
        for target, line in rows[rows["operation"] == operation].groupby("target"):
            drawn = axis.plot(line["layer"], line["mlp_out"], marker="o", markersize=3, label=str(target).upper())[0]
            axis.fill_between(
                line["layer"], line["mlp_out_low"], line["mlp_out_high"], alpha=0.2, color=drawn.get_color()
            )
        axis.set(title=operation, xlabel="layer", ylabel="cosine with the unembedding")
    axes[0].legend(fontsize=8)
    return figure


def sweep_curves(store: Store, run_id: str) -> Figure:
    """Accuracy (%) against the layer that has the LoRA, with its interval; the original model as a dashed line."""
    curve = store.dataframe(
        "SELECT layer, operation, 100 * baseline_accuracy AS original, 100 * accuracy AS accuracy, 100 * low AS low,"
        f" 100 * high AS high FROM lora_sweep_curve WHERE run_id = '{run_id}' ORDER BY layer"
    )
    if curve.empty:
        raise UserError(f"run {run_id} has no finished trials; the same command of 'mathinterp tune sweep' runs them")
    operations = _operations(curve)
    figure, axes = _panels(len(operations))
    for axis, operation in zip(axes, operations, strict=True):
        rows = curve[curve["operation"] == operation]
        axis.plot(rows["layer"], rows["accuracy"], marker="o", markersize=3, label="LoRA in this layer")
        axis.fill_between(rows["layer"], rows["low"], rows["high"], alpha=0.2)
        axis.axhline(rows["original"].iloc[0], linestyle="--", color="grey", label="original")
        axis.set(title=operation, xlabel="layer", ylabel="accuracy, %", ylim=(0, 102))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(fontsize=8)
    return figure


FIGURES = {
    "heads": effect_maps,
    "paths": effect_maps,
    "knockout": knockout_curves,
    "attention": attention_bars,
    "probe": probing_lines,
    "lora_sweep": sweep_curves,
}  # scan -> what is drawn of its runs


def draw(store: Store, run_id: str) -> Figure:
    """The figure of a run, by its scan; raises UserError for an unknown run or a scan that has none."""
    scan = _scan_of(store, run_id)
    if scan not in FIGURES:
        raise UserError(f"run {run_id} is a scan of {scan}, which has no figure (there are for {', '.join(FIGURES)})")
    return FIGURES[scan](store, run_id)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path``.png and ``path``.svg; returns both."""
    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=150)
    return written


def _scan_of(store: Store, run_id: str) -> str:
    found = store.dataframe(f"SELECT scan FROM runs WHERE run_id = '{run_id}'")
    if found.empty:
        raise UserError(f"no run {run_id} in the store; SELECT run_id, scan FROM runs lists them")
    return str(found["scan"].iloc[0])


def _operations(rows: pd.DataFrame) -> list[str]:
    """The operations in the rows, 'all' first."""
    return sorted(rows["operation"].unique(), key=lambda operation: (operation != "all", operation))


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(PANEL * count + 0.8, PANEL), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])
