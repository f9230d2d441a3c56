"""The drawing of a chain: five columns of stages, left to right."""

import json

import altair as alt
import pandas as pd

from mathinterp.experiments.chain import ChainOptions
from mathinterp.experiments.chain.summary import chain_rows, name, title
from mathinterp.experiments.charts import names_legend
from mathinterp.experiments.figures import Figure, Tip, data_of, titled, with_tips
from mathinterp.experiments.results import Results, Row

STAGES = {
    "shallow_neuron": ("shallow FFN neurons", "log-odds, nats"),
    "attention": ("attention from END", "log-odds, nats"),
    "head": ("arithmetic heads", "fall of p when zeroed"),
    "deep_neuron": ("deep FFN neurons", "change, nats"),
    "prediction": ("prediction", "p"),
}
TIPS = [
    Tip("stage_name", "stage", "text"), Tip("name", "name", "text"), Tip("at", "at", "text"),
    Tip("via", "through head", "text"),
    Tip("strength", "strength"), Tip("unit", "strength is", "text"), Tip("weight", "attention weight"),
    Tip("exact_effect", "exact effect"), Tip("share", "of prompts", "%"), Tip("tokens", "tokens", "text"),
]  # fmt: skip
BOX = 128  # pixels


def draw(results: Results, shown: ChainOptions) -> Figure:
    """Five columns, left to right; a line joins a neuron and the head that moves it, and a head and what it reads."""
    rows, single = chain_rows(results, shown.operation)
    places = [
        row | {"line": line} for stage in STAGES for line, row in enumerate(r for r in rows if r["stage"] == stage)
    ]
    boxes = data_of(pd.DataFrame([_box(row, single) for row in places]))
    domain = [heading for heading, _ in STAGES.values()]
    scale = alt.Scale(domain=domain, paddingInner=0.25, paddingOuter=0.05)
    deepest = max(row["line"] for row in places)
    y_scale = alt.Scale(domain=[deepest + 0.5, -0.9], nice=False)
    chart = alt.Chart(boxes).encode(x=alt.X("stage_name:O", scale=scale, axis=None))
    middle = alt.Y("line:Q", scale=y_scale, axis=None)
    rect = chart.mark_rect(opacity=0.3, cornerRadius=4).encode(
        y=alt.Y("top:Q", scale=y_scale, axis=None), y2="bottom:Q",
        color=alt.Color("acts:N", sort=["raises", "lowers"], legend=names_legend("the answer")),
    )  # fmt: skip
    texts = [
        chart.mark_text(dy=dy, fontSize=10, limit=BOX - 6, tooltip=None).encode(y=middle, text=f"{text}:N")
        for text, dy in (("heading", -13), ("value", 0), ("first_tokens", 13))
    ]
    lines = _lines(places)
    joined = []
    if lines:
        rule = alt.Chart(data_of(pd.DataFrame(lines))).mark_rule(opacity=0.45, tooltip=None)
        joined.append(rule.encode(
            x=alt.X("stage_name:O", scale=scale, bandPosition=1, axis=None), x2=alt.X2("next_stage:O", bandPosition=0),
            y=alt.Y("line:Q", scale=y_scale, axis=None), y2="next_line:Q",
        ))  # fmt: skip
    headings = alt.Chart(data_of(pd.DataFrame({"stage_name": domain, "line": -0.7})))
    heads = headings.mark_text(fontSize=11, fontWeight="bold", tooltip=None).encode(
        x=alt.X("stage_name:O", scale=scale, axis=None), y=middle, text="stage_name:N"
    )
    figure = alt.layer(*joined, with_tips(rect, TIPS), *texts, heads).properties(
        width=(BOX + 36) * len(STAGES), height=56 * (deepest + 1.4)
    )
    return titled(
        figure, results, title(results, shown.operation, single),
        "Five columns, left to right: shallow neurons, what END attends to, arithmetic heads, deep neurons and the"
        " prediction; lines join neurons to the head that moves them and heads to what they read and change.",
        label=shown.operation,
    )  # fmt: skip


def _box(row: Row, single: bool) -> Row:
    """A row of the data of boxes."""
    stage_name, unit = STAGES[row["stage"]]
    heading, strength = name(row), float(row["strength"])
    at = row["token"] if single else row["token_type"]
    if row["stage"] in ("shallow_neuron", "attention"):
        heading += f" at {at}"
    value = f"{strength:.3g}"
    if row["stage"] == "prediction" and single:
        value = f"{strength:.2g}, zeroed {float(row['probability_zeroed']):.2g}"
    if row["stage"] == "attention" and row["weight"] is not None:
        value += f"  (weight {float(row['weight']):.2f})"
    tokens = [] if row["tokens"] is None else json.loads(row["tokens"])
    return {
        "stage_name": stage_name, "line": row["line"], "top": row["line"] - 0.4, "bottom": row["line"] + 0.4,
        "heading": heading, "value": value, "first_tokens": " ".join(tokens[:4]), "tokens": " ".join(tokens) or None,
        "acts": "raises" if strength > 0 else "lowers", "name": name(row), "at": at, "unit": unit,
        "via": row.get("via"), "strength": strength, "weight": row["weight"], "share": row["share"],
        "exact_effect": row.get("exact_effect"),
    }  # fmt: skip


def _lines(places: list[Row]) -> list[Row]:
    """Neuron to the head that moves it, read to its head, zeroed head to the neurons that fall with it."""
    found = []
    for row in places:
        for other in places:
            stages = row["stage"], other["stage"]
            moved = stages == ("shallow_neuron", "attention") and row["via"] == other["name"]
            read = stages == ("attention", "head") and row["name"] == other["name"]
            falls = stages == ("head", "deep_neuron") and row["name"] == other["via"]
            if moved or read or falls:
                ends = (STAGES[row["stage"]][0], row["line"], STAGES[other["stage"]][0], other["line"])
                found.append(dict(zip(("stage_name", "line", "next_stage", "next_line"), ends, strict=True)))
    return found
