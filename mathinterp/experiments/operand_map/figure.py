"""Operand maps as a picture: the best units of unlike heuristics, how many each explains, and what few neurons do."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.errors import UserError
from mathinterp.experiments.operand_map import ShownUnits
from mathinterp.experiments.operand_map.summary import EXPLAINED, IN_WORDS, shorter_sentences
from mathinterp.experiments.results import Results, Row

COLUMNS, NEURONS, HEADS = 4, 6, 2
LEGEND = (
    "One pixel is one pair (a, b). Titles: the rule that best tells bright pixels from dark ones, and how well"
    " (AUROC: 1 in every case, 0.5 by chance alone).{missing}{shorter}"
)
MEASURED = {
    "coefficient": "coefficient",
    "norm": "norm of output",
    "answer": "share in answer's logit",
}
SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def draw(results: Results, shown: ShownUnits) -> Figure:
    """Two rows of heat maps over (a, b), and a row of what all units together say."""
    chosen = [*_chosen(results, "neuron", NEURONS), *_chosen(results, "head", HEADS)]
    if not chosen:
        raise UserError("the run has no maps to draw yet; the same command computes what is missing")
    figure = Figure(figsize=(15, 11.5), layout="constrained")
    shorter = "".join(f"\n{said}" for said in shorter_sentences(results))
    room = "\n" * (2 if shorter else 1)  # for the legend's lines
    figure.suptitle(
        f"{_named(results)}: what heads and neurons do at the last token before the answer{room}", fontsize=15
    )  # fmt: skip
    grids = [_grid(results, unit) for unit in chosen]
    missing = " Grey pairs were not asked." if np.isnan(grids[0]).any() else ""
    figure.text(0.5, 0.965, LEGEND.format(missing=missing, shorter=shorter), ha="center", va="top", fontsize=10.5)
    rows = -(-len(chosen) // COLUMNS)
    maps, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(rows, 0.95), hspace=0.03)[:, 0]
    axes = maps.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis, unit, grid in zip(axes, chosen, grids, strict=False):
        _map(axis, unit, grid)
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    histogram, families, kept = below.subplots(1, 3)
    _histogram(histogram, results)
    _families(families, results)
    _kept(kept, results)
    return figure


def _named(results: Results) -> str:
    (run,) = results.rows(
        """SELECT any_value(r.model) AS model, any_value(p.operation) AS operation
           FROM runs AS r JOIN prompts AS p USING (prompts_fingerprint) WHERE r.run_id = $run"""
    )
    operation = run["operation"]
    if operation is None:
        return str(run["model"])
    return f"{run['model']}, {f'a {SIGN[operation]} b' if operation in SIGN else operation}"


def _chosen(results: Results, node: str, count: int) -> list[Row]:
    """A unit of each family (of heads: of each measure), of largest AUROC first, among those whose maps are kept.

    Of several with a high AUROC that whose heuristic's classes explain most of the variance: its map shows them.
    """
    kind = "measure" if node == "head" else "family"
    return results.rows(
        f"""SELECT node, unit, layer, head, neuron, measure, heuristic, high, auroc, shuffled
            FROM operand_units WHERE run_id = $run AND node = $node AND map_kept AND auroc IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY {kind} ORDER BY auroc >= {EXPLAINED} DESC,
                                            CASE WHEN auroc >= {EXPLAINED} THEN explained ELSE auroc END DESC,
                                            layer, coalesce(head, neuron)) = 1
            ORDER BY auroc DESC LIMIT $count""",
        node=node,
        count=count,
    )


def _grid(results: Results, unit: Row) -> np.ndarray:
    """Values as a x b; NaN where a pair was not asked."""
    rows = results.frame(
        """SELECT a, b, value FROM operand_maps WHERE run_id = $run AND node = $node AND layer = $layer
           AND coalesce(head, neuron) = $number AND measure = $measure""",
        node=unit["node"], layer=unit["layer"], measure=unit["measure"],
        number=unit["head"] if unit["node"] == "head" else unit["neuron"],
    )  # fmt: skip
    grid = np.full((100, 100), np.nan)
    grid[rows["a"].astype(int), rows["b"].astype(int)] = rows["value"]
    return grid


def _map(axis: Axes, unit: Row, grid: np.ndarray) -> None:
    low, high = np.nanquantile(grid, (0.005, 0.995))
    image = axis.imshow(grid, cmap="viridis", vmin=low, vmax=high, origin="lower", interpolation="nearest")
    there = "high" if unit["high"] else "low"
    axis.set_title(
        f"{unit['node']} {unit['unit']}\n{there} where {unit['heuristic']}\n"
        f"AUROC {unit['auroc']:.2f}, pairs shuffled {unit['shuffled']:.2f}",
        fontsize=10,
    )  # fmt: skip
    axis.set(xlabel="b", ylabel="a", xticks=range(0, 100, 20), yticks=range(0, 100, 20), facecolor="0.85")
    bar = axis.figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
    bar.set_label(MEASURED[unit["measure"]], fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _histogram(axis: Axes, results: Results) -> None:
    rows = results.frame(
        "SELECT auroc, shuffled FROM operand_units WHERE run_id = $run AND node = 'neuron' AND auroc IS NOT NULL"
    )
    bins = np.linspace(0.5, 1, 51).tolist()
    axis.hist(rows["shuffled"], bins=bins, color="0.6", label="pairs shuffled")
    axis.hist(rows["auroc"], bins=bins, color="tab:blue", alpha=0.8, label="as they are")
    axis.set(title="Best heuristic of each neuron", xlabel="AUROC", ylabel="neurons")
    axis.legend(fontsize=9)


def _families(axis: Axes, results: Results) -> None:
    rows = results.frame(
        f"""SELECT family, count_if(auroc >= {EXPLAINED}) AS explained, count(*) AS neurons FROM operand_units
            WHERE run_id = $run AND node = 'neuron' AND family IS NOT NULL GROUP BY family
            ORDER BY neurons DESC, family LIMIT 10"""
    ).iloc[::-1]
    names = [IN_WORDS[family] for family in rows["family"]]
    axis.barh(names, rows["neurons"], color="0.8", label="best heuristic is of this kind")
    axis.barh(names, rows["explained"], color="tab:blue", label=f"and its AUROC is {EXPLAINED} or more")
    axis.set(title="Neurons by kind of heuristic", xlabel="neurons")
    axis.legend(fontsize=9, loc="lower right")


def _kept(axis: Axes, results: Results) -> None:
    rows = results.frame("SELECT * FROM operand_faithfulness WHERE run_id = $run ORDER BY k")
    if rows.empty:
        axis.set_axis_off()
        return
    none = rows[rows["k"] == 0]
    for ranking, colour, label in (("top", "tab:blue", "of largest effect"), ("random", "0.5", "random")):
        own = pd.concat([none, rows[(rows["ranking"] == ranking) & (rows["k"] > 0)]])
        axis.plot(own["k"].astype(str), 100 * own["accuracy"], marker="o", color=colour, label=label)
    axis.axhline(100 * rows["baseline_accuracy"].iloc[0], color="black", linestyle=":", label="whole model")
    axis.set(
        title="First answer token right with few neurons",
        xlabel=f"neurons kept in each deep layer (others: {rows['ablation'].iloc[0]})",
        ylabel="% of pairs", ylim=(0, 104),
    )  # fmt: skip
    axis.legend(fontsize=9)
