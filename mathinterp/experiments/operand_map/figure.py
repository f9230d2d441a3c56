"""Operand maps as a figure: the best units of unlike heuristics, how many each explains, and what few neurons do.

A map of 100 x 100 pairs is a picture of one pixel for each pair: as marks, 80,000 would be too many for a page.
"""

import base64
import struct
import zlib

import altair as alt
import numpy as np
import pandas as pd

from mathinterp.errors import UserError
from mathinterp.experiments.charts import curves, names_legend
from mathinterp.experiments.figures import (
    HEIGHT,
    WIDTH,
    Figure,
    Tip,
    data_of,
    interval,
    titled,
    with_tips,
    wrapped,
)
from mathinterp.experiments.operand_map import ShownUnits
from mathinterp.experiments.operand_map.summary import EXPLAINED, IN_WORDS, shorter_sentences
from mathinterp.experiments.results import Results, Row

NEURONS, HEADS = 6, 2
SIZE = 200  # pixels of a map's side: two for each pair
LEGEND = (
    "A pixel is a pair (a, b), bright where the value is high; below each name the rule that best tells bright from"
    " dark (AUROC 1: in every case, 0.5: by chance)."
)
MEASURED = {"coefficient": "coefficient", "norm": "norm of output", "answer": "share in answer's logit"}
SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
UNIT_TIPS = [
    Tip("node", "node", "text"), Tip("unit", "unit", "text"), Tip("measured", "shown", "text"),
    interval("low", "high", "", "dark to bright"),
    Tip("heuristic", "heuristic", "text"), Tip("auroc", "AUROC"), Tip("shuffled", "AUROC, pairs shuffled"),
    Tip("explained", "variance between its classes", "%"), Tip("pairs", "pairs", "whole"),
]  # fmt: skip


def draw(results: Results, shown: ShownUnits) -> Figure:
    """Maps over (a, b), and what all units together say."""
    chosen = [*_chosen(results, "neuron", NEURONS), *_chosen(results, "head", HEADS)]
    if not chosen:
        raise UserError("the run has no maps to draw yet; the same command computes what is missing")
    grids = [_grid(results, unit) for unit in chosen]
    missing = ["Pairs without a colour were not asked."] if np.isnan(grids[0]).any() else []
    parts = [_map(unit, grid) for unit, grid in zip(chosen, grids, strict=True)]
    parts += [_histogram(results), _families(results), *_kept(results)]
    return titled(
        alt.concat(*parts, columns=4).resolve_scale(color="independent"), results,
        f"{_named(results)}: what heads and neurons do at the last token before the answer",
        f"{len(chosen)} maps over the pairs of operands, each of the best unit of one kind of heuristic; a histogram of"
        " the neurons' AUROC, bars of neurons by kind of heuristic, and accuracy with few neurons kept.",
        [LEGEND, *missing, *shorter_sentences(results)],
    )  # fmt: skip


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
        f"""SELECT node, unit, layer, head, neuron, measure, heuristic, high, auroc, shuffled, explained
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


def _map(unit: Row, grid: np.ndarray) -> Figure:
    low, high = (float(end) for end in np.nanquantile(grid, (0.005, 0.995)))
    measured, there = MEASURED[unit["measure"]], "high" if unit["high"] else "low"
    row = {name: unit[name] for name in ("node", "unit", "heuristic", "auroc", "shuffled", "explained")}
    row |= {"measured": measured, "low": low, "high": high, "pairs": int(np.isfinite(grid).sum())}
    picture = alt.Chart(data_of(pd.DataFrame([row]))).mark_image(
        url=_picture(grid, low, high), width=SIZE, height=SIZE, aspect=False, smooth=False
    )
    ends = alt.Scale(domain=[-0.5, 99.5], nice=False)
    ticks = alt.Axis(values=list(range(0, 100, 20)), grid=False)
    title = [
        f"{unit['node']} {unit['unit']}", f"{there} where {unit['heuristic']}",
        f"AUROC {unit['auroc']:.2f}, pairs shuffled {unit['shuffled']:.2f}", f"{measured}: {low:.3g} to {high:.3g}",
    ]  # fmt: skip
    lines = [line for text in title for line in wrapped(text, 42)]
    return with_tips(picture, UNIT_TIPS).encode(
        x=alt.X(datum=49.5, type="quantitative", title="b", scale=ends, axis=ticks),
        y=alt.Y(datum=49.5, type="quantitative", title="a", scale=ends, axis=ticks),
    ).properties(width=SIZE, height=SIZE, title=alt.TitleParams(text=lines[0], subtitle=lines[1:]))  # fmt: skip


def _picture(grid: np.ndarray, low: float, high: float) -> str:
    """The grid as a PNG in a data URI, a pixel for each pair, b to the right and a upwards; clear where it is NaN."""
    anchors = np.array([[int(code[i : i + 2], 16) for i in (0, 2, 4)] for code in VIRIDIS], float)
    share = np.clip((np.nan_to_num(grid[::-1]) - low) / ((high - low) or 1.0), 0, 1) * (len(anchors) - 1)
    colours = [np.interp(share, range(len(anchors)), anchors[:, channel]) for channel in range(3)]
    rgba = np.stack([*colours, np.where(np.isnan(grid[::-1]), 0, 255)], axis=-1).round().astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in rgba)  # each line unfiltered
    height, width = grid.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _histogram(results: Results) -> Figure:
    rows = results.frame(
        """SELECT what, floor(100 * auroc) / 100 AS auroc, floor(100 * auroc) / 100 + 0.01 AS next, count(*) AS neurons
           FROM (SELECT unnest(['as they are', 'pairs shuffled']) AS what, unnest([auroc, shuffled]) AS auroc
                 FROM operand_units WHERE run_id = $run AND node = 'neuron' AND auroc IS NOT NULL)
           GROUP BY ALL ORDER BY ALL"""
    )
    tips = [Tip("what", "pairs", "text"), interval("auroc", "next", "", "AUROC"), Tip("neurons", "neurons", "whole")]
    bars = alt.Chart(data_of(rows)).mark_bar(opacity=0.7).encode(
        x=alt.X("auroc:Q", bin="binned", title="AUROC of the best heuristic", scale=alt.Scale(domain=[0.5, 1.01])),
        x2="next:Q",
        y=alt.Y("neurons:Q", stack=None), color=alt.Color("what:N", legend=names_legend()),
    )  # fmt: skip
    return with_tips(bars, tips).properties(width=WIDTH, height=HEIGHT, title="Best heuristic of each neuron")


def _families(results: Results) -> Figure:
    rows = results.frame(
        f"""SELECT family, count_if(auroc >= {EXPLAINED}) AS explained, count(*) AS neurons FROM operand_units
            WHERE run_id = $run AND node = 'neuron' AND family IS NOT NULL GROUP BY family
            ORDER BY neurons DESC, family LIMIT 10"""
    )
    rows = rows.assign(family=rows["family"].map(IN_WORDS))
    tips = [
        Tip("family", "best heuristic", "text"), Tip("neurons", "neurons", "whole"),
        Tip("explained", f"with an AUROC of {EXPLAINED} or more", "whole"),
    ]  # fmt: skip
    base = alt.Chart(data_of(rows)).encode(
        y=alt.Y("family:N", sort=list(rows["family"]), title=None, axis=alt.Axis(labelLimit=120))
    )
    every = with_tips(base.mark_bar(opacity=0.35), tips).encode(x=alt.X("neurons:Q", title="neurons"))
    explained = with_tips(base.mark_bar(), tips).encode(x="explained:Q")
    title = alt.TitleParams(text="Neurons by kind of heuristic", subtitle=f"full colour: AUROC {EXPLAINED} or more")
    return alt.layer(every, explained).properties(width=WIDTH - 60, height=HEIGHT, title=title)


def _kept(results: Results) -> list[Figure]:
    """Nothing where the run kept none."""
    rows = results.frame(
        """SELECT CASE ranking WHEN 'top' THEN 'of largest effect' ELSE 'random' END AS neurons, k, n, accuracy,
                  baseline_accuracy, baseline_accuracy - drop_high AS low, baseline_accuracy - drop_low AS high,
                  faithfulness, ablation
           FROM (SELECT * REPLACE (unnest(CASE k WHEN 0 THEN ['top', 'random'] ELSE [ranking] END) AS ranking)
                 FROM operand_faithfulness WHERE run_id = $run)
           ORDER BY k"""
    )
    if rows.empty:
        return []
    k, accuracy = Tip("k", "neurons kept in each deep layer", "whole"), Tip("accuracy", "pairs right", "%")
    tips = [
        Tip("neurons", "neurons", "text"), k, accuracy, interval("low", "high", "%", "95 % interval, paired"),
        Tip("baseline_accuracy", "whole model", "%"), Tip("faithfulness", "faithfulness"), Tip("n", "pairs", "whole"),
    ]  # fmt: skip
    figure = curves(
        rows.drop(columns="ablation"), k, accuracy, ("low", "high"), tips, series=Tip("neurons", ""), panel=None,
        x_scale=alt.Scale(type="symlog", constant=10), y_scale=alt.Scale(domain=[0, 1]), rule="baseline_accuracy",
        ticks=sorted(map(int, rows["k"].unique())),
    )  # fmt: skip
    title = alt.TitleParams(
        text="First answer token right with few neurons",
        subtitle=f"others: {rows['ablation'].iloc[0]}; dashed: whole model",
    )
    return [figure.properties(title=title)]
