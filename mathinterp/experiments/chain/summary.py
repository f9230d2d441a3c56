"""What a chain run says: one table of its stages, and one drawing. From the stored rows alone.

Knows the store's views; knows nothing about models or how rows were computed.
"""

import json
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.errors import UserError
from mathinterp.store import Store

SHOWN = 5  # rows of a stage
STAGES = ("shallow_neuron", "attention", "head", "deep_neuron", "prediction")
TITLES = {
    "shallow_neuron": "shallow FFN neurons, before the\nhead's layer (log-odds, nats)",
    "attention": "attention from END\n(log-odds, nats, read)",
    "head": "arithmetic heads\n(fall of p when zeroed)",
    "deep_neuron": "deep FFN neurons, from that\nhead's layer on (change, nats)",
    "prediction": "prediction\n(p, and with the head zeroed)",
}
COLUMNS = {
    "strength": "strength", "exact_effect": "exact", "deep_effect": "on deep", "weight": "weight",
}  # fmt: skip

STAGES_EXPLAINED = (
    "shallow_neuron: of a layer before that of the head under via; deep_neuron: of that head's layer or a later one"
    " (the deep layers of maskkeep go by the model's depth instead)."
)


@dataclass(frozen=True)
class ChainSummary:
    """The answer of a chain run: rows of all stages, of one prompt, or of an operation where there are several."""

    title: str
    table: list[dict[str, Any]]
    verdict: str
    queries: list[str]


def summarize_chain(store: Store, run_id: str, operation: str = "all") -> ChainSummary:
    """Summarize a chain run; ``operation`` counts where it has several prompts.

    Raises UserError for a run without rows of that operation.
    """
    rows, single = chain_rows(store, run_id, operation)
    where = f"WHERE run_id = '{run_id}'"
    quoted = operation.replace("'", "''")
    view = f"chain {where}" if single else f"chain_summary {where} AND operation = '{quoted}'"
    queries = [
        f"SELECT * FROM {view} AND stage = 'shallow_neuron' ORDER BY strength DESC LIMIT 20",
        f"SELECT name, token, token_type, weight, effect, from_neurons FROM chain {where} AND stage = 'attention'"
        " AND arithmetic ORDER BY prompt_id, effect DESC LIMIT 20",
        f"SELECT * FROM {view} AND stage = 'head' ORDER BY strength DESC LIMIT 20",
    ]
    return ChainSummary(_title(store, run_id, operation, single), _table(rows, single), _verdict(store, where), queries)


def chain_rows(store: Store, run_id: str, operation: str) -> tuple[list[dict[str, Any]], bool]:
    """The first rows of every stage, and whether they are one prompt's."""
    count = store.rows(f"SELECT count(DISTINCT prompt_id) AS n FROM chain WHERE run_id = '{run_id}'")[0]["n"]
    if not count:
        raise UserError(f"run {run_id} has no chain; make one with 'mathinterp chain'")
    quoted = operation.replace("'", "''")
    if count == 1:
        rows = store.rows(
            f"""SELECT *, 1.0 AS share FROM chain WHERE run_id = '{run_id}'
                QUALIFY row_number() OVER (PARTITION BY stage ORDER BY strength DESC, place) <= {SHOWN} OR target
                    OR (stage = 'head' AND arithmetic)
                ORDER BY stage_number, strength DESC, place"""
        )
        return rows, True
    rows = store.rows(
        f"""SELECT *, NULL::DOUBLE AS probability_zeroed FROM chain_summary
            WHERE run_id = '{run_id}' AND operation = '{quoted}'
            QUALIFY row_number() OVER (PARTITION BY stage ORDER BY strength DESC, name) <= {SHOWN}
            ORDER BY stage_number, strength DESC, name"""
    )
    if not rows:
        raise UserError(f"run {run_id} has no prompts of operation '{operation}'")
    return rows, False


def _table(rows: list[dict[str, Any]], single: bool) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        where = row["token_type"]
        if single and row["stage"] in ("shallow_neuron", "attention"):
            where = f"{row['token']} ({row['token_type']})"
        shown: dict[str, Any] = {"stage": row["stage"], "name": _name(row), "via": row["via"], "at": where}
        shown |= {label: row[column] for column, label in COLUMNS.items()}
        if single:
            shown["head zeroed"] = row["probability_zeroed"]
        else:
            shown["% of prompts"] = 100 * row["share"]
        shown["tokens"] = None if row["tokens"] is None else " ".join(json.loads(row["tokens"])[:6])
        found.append(shown)
    return found


def _name(row: dict[str, Any]) -> str:
    """The row's name; a star for an arithmetic head of the prompt."""
    return f"{row['name']} *" if row["stage"] == "head" and row.get("arithmetic") else str(row["name"])


def _verdict(store: Store, where: str) -> str:
    """The heads that lead, and how much of what the arithmetic heads read was put there by earlier FFN neurons."""
    leading = store.rows(
        f"""SELECT name, count(*) AS n FROM chain {where} AND stage = 'head' AND place = 1
            GROUP BY name ORDER BY n DESC, name"""
    )
    heads = ", ".join(f"{row['name']} ({row['n']})" for row in leading[:4])
    reads = store.rows(
        f"""SELECT sum(from_neurons) AS from_neurons, sum(effect) AS effect
            FROM chain {where} AND stage = 'attention' AND arithmetic"""
    )[0]
    first = f"Head that costs the answer most, by prompts: {heads}."
    if not reads["effect"]:
        return first
    return (
        f"{first} What the arithmetic heads read is worth {reads['effect']:.4g} nats of log-odds to first order in all,"
        f" of which earlier FFN neurons put {reads['from_neurons']:.4g} there; the rest is embeddings, attention and"
        " biases."
    )


def _title(store: Store, run_id: str, operation: str, single: bool) -> str:
    run = store.rows(f"SELECT model, prompts FROM runs WHERE run_id = '{run_id}'")[0]
    if not single:
        return f"{run['prompts']}, operation {operation} ({run['model']})"
    prompt = store.rows(
        f"""SELECT text, answer FROM prompts JOIN runs USING (prompts_fingerprint)
            WHERE run_id = '{run_id}'"""
    )
    return f"{prompt[0]['text']} {prompt[0]['answer']} ({run['model']}; * arithmetic head)"


# ---- the drawing ----


def chain_figure(store: Store, run_id: str, operation: str = "all") -> Figure:
    """Five columns, left to right; a line joins a neuron and the head that moves it, and a head and what it reads."""
    rows, single = chain_rows(store, run_id, operation)
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    axis = figure.subplots()
    places: list[tuple[str, dict[str, Any], float]] = []
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
    axis.set_title(_title(store, run_id, operation, single), fontsize=10, parse_math=False)
    return figure


def _draw_box(axis: Axes, column: int, height: float, row: dict[str, Any], single: bool) -> None:
    head, strength = _name(row), float(row["strength"])
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


def _draw_lines(axis: Axes, places: list[tuple[str, dict[str, Any], float]]) -> None:
    """Neuron to the head that moves it, read to its head, zeroed head to the neurons that fall with it."""
    for stage, row, height in places:
        for other_stage, other, other_height in places:
            moved = (stage, other_stage) == ("shallow_neuron", "attention") and row["via"] == other["name"]
            read = (stage, other_stage) == ("attention", "head") and row["name"] == other["name"]
            falls = (stage, other_stage) == ("head", "deep_neuron") and row["name"] == other["via"]
            if moved or read or falls:
                start = STAGES.index(stage)
                axis.plot([start, start + 1], [height, other_height], color="grey", linewidth=0.7, zorder=0)
