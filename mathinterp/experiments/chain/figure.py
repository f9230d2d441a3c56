"""The drawing of a chain: five columns of stages, left to right."""

import json

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.experiments.chain import ChainOptions
from mathinterp.experiments.chain.summary import chain_rows, name, title
from mathinterp.experiments.results import Results, Row

STAGES = ("shallow_neuron", "attention", "head", "deep_neuron", "prediction")
TITLES = {
    "shallow_neuron": "shallow FFN neurons, before the\nhead's layer (log-odds, nats)",
    "attention": "attention from END\n(log-odds, nats, read)",
    "head": "arithmetic heads\n(fall of p when zeroed)",
    "deep_neuron": "deep FFN neurons, from that\nhead's layer on (change, nats)",
    "prediction": "prediction\n(p, and with the head zeroed)",
}


def draw(results: Results, shown: ChainOptions) -> Figure:
    """Five columns, left to right; a line joins a neuron and the head that moves it, and a head and what it reads."""
    operation = shown.operation
    rows, single = chain_rows(results, operation)
    figure = Figure(figsize=(15, 5.2), layout="constrained", label=operation)
    axis = figure.subplots()
    places: list[tuple[str, Row, float]] = []
    for column, stage in enumerate(STAGES):
        part = [row for row in rows if row["stage"] == stage]
        axis.text(column, 0.7, TITLES[stage], ha="center", va="bottom", fontsize=9, weight="bold")
        for line, row in enumerate(part):
            _draw_box(axis, column, -float(line), row, single)
            places.append((stage, row, -float(line)))
        if not part:
            axis.text(column, 0, "none", ha="center", va="center", fontsize=8, color="grey")
    _draw_lines(axis, places)
    deepest = min((height for _, _, height in places), default=0.0)
    axis.set(xlim=(-0.55, len(STAGES) - 0.45), ylim=(deepest - 0.7, 1.7))
    axis.set_axis_off()
    axis.set_title(title(results, operation, single), fontsize=10, parse_math=False)
    return figure


def _draw_box(axis: Axes, column: int, height: float, row: Row, single: bool) -> None:
    head, strength = name(row), float(row["strength"])
    if row["stage"] in ("shallow_neuron", "attention"):
        head += f" at {row['token'] if single else row['token_type']}"
    second = f"{strength:.3g}"
    if row["stage"] == "prediction" and single:
        second = f"{strength:.2g}, zeroed {float(row['probability_zeroed']):.2g}"
    if row["stage"] == "attention" and row["weight"] is not None:
        second += f"  (weight {float(row['weight']):.2f})"
    lines = [head, second]
    if row["tokens"] is not None:
        lines.append(" ".join(json.loads(row["tokens"])[:4]))
    face = "mistyrose" if strength > 0 else "aliceblue"
    axis.text(column, height, "\n".join(lines), ha="center", va="center", fontsize=7, parse_math=False,
              bbox={"boxstyle": "round,pad=0.3", "facecolor": face, "edgecolor": "grey"})  # fmt: skip


def _draw_lines(axis: Axes, places: list[tuple[str, Row, float]]) -> None:
    """Neuron to the head that moves it, read to its head, zeroed head to the neurons that fall with it."""
    for stage, row, height in places:
        for other_stage, other, other_height in places:
            moved = (stage, other_stage) == ("shallow_neuron", "attention") and row["via"] == other["name"]
            read = (stage, other_stage) == ("attention", "head") and row["name"] == other["name"]
            falls = (stage, other_stage) == ("head", "deep_neuron") and row["name"] == other["via"]
            if moved or read or falls:
                start = STAGES.index(stage)
                axis.plot([start, start + 1], [height, other_height], color="grey", linewidth=0.7, zorder=0)
