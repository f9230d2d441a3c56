"""Gender bias before and after an edit, against random neurons, and its cost on ordinary text (paper A, 6.2)."""

import altair as alt
import pandas as pd

from mathinterp.experiments.charts import intervals
from mathinterp.experiments.figures import Figure, Tip, interval, titled
from mathinterp.experiments.results import Results

EDIT = "CASE edit WHEN 'random' THEN 'random, seed ' || seed ELSE edit END"
ORDER = "edit = 'original' DESC, edit, seed"
NAME, SHOWN = Tip("name", ""), Tip("name", "neurons zeroed", "text")


def draw(results: Results) -> Figure:
    """Points with intervals: bias per stereotype, and the change of nats per token where text was scored."""
    bias = results.frame(
        f"""SELECT {EDIT} AS name, stereotype, n, bias, bias_low, bias_high, change, change_low, change_high,
                   relative_change, p_value AS p
            FROM gender_effects WHERE run_id = $run ORDER BY stereotype = 'all' DESC, stereotype, {ORDER}"""
    )
    text = results.frame(
        f"""SELECT {EDIT} AS name, passages, tokens, loss, loss_change, loss_change_low AS low, loss_change_high AS high
            FROM edit_perplexity WHERE run_id = $run AND edit <> 'original' ORDER BY {ORDER}"""
    )
    parts = [
        *([_bias(bias)] if len(bias) or text.empty else []),
        *([_text(text)] if len(text) else []),
    ]
    return titled(
        parts[0] if len(parts) == 1 else alt.vconcat(*parts), results, "What the edit changes, against random neurons",
        "Points with 95 % intervals: the gender bias of each stereotype without an edit, with the chosen neurons and"
        " with random ones at zero; and what each costs on ordinary text, in nats per token.",
    )  # fmt: skip


def _bias(rows: pd.DataFrame) -> Figure:
    value = Tip("bias", "gender bias", "nats")
    tips = [
        Tip("stereotype", "stereotype", "text"), SHOWN, value, interval("bias_low", "bias_high", "nats"),
        Tip("change", "change", "nats"), interval("change_low", "change_high", "nats", "its interval"),
        Tip("relative_change", "relative change", "%"), Tip("p", "p of the change"), Tip("n", "professions", "whole"),
    ]  # fmt: skip
    names = list(dict.fromkeys(rows["name"]))
    return intervals(rows, NAME, value, ("bias_low", "bias_high"), tips, order=names, panel="stereotype", rule=[0])


def _text(rows: pd.DataFrame) -> Figure:
    value = Tip("loss_change", "change on ordinary text", "nats per token")
    tips = [
        SHOWN, value, interval("low", "high", "nats"), Tip("loss", "loss", "nats per token"),
        Tip("passages", "passages", "whole"), Tip("tokens", "tokens", "whole"),
    ]  # fmt: skip
    return intervals(rows, NAME, value, ("low", "high"), tips, rule=[0])
