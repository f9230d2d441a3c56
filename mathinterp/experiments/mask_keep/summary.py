"""What a finished mask/keep run says, from the stored rows alone; decreases are fractions of the original accuracy.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Sequence
from typing import Any

from mathinterp.experiments.mask_keep import MaskKeepShown
from mathinterp.experiments.results import Results, Row, Shown, Summary
from mathinterp.text import quoted

PER_OPERATION = ("operation", "k", "prompts", "mask", "mask_random", "keep", "keep_random", "coef")


def summarize(results: Results, shown: MaskKeepShown) -> Summary:
    """The table over all operations, one row a k: mask and keep, each with its interval, random neurons and the least
    and most of the random draws, and coef; and the rows of paper_a_table5 by operation.
    """
    cases, scoring = shown.cases, shown.scoring
    (run,) = results.rows("SELECT parameters ->> 'neurons_from' AS neurons_from FROM runs WHERE run_id = $run")
    asked = {**run, "cases": cases, "scoring": scoring}
    if not results.finished:
        return Summary(data=asked)
    where = f"run_id = $run AND cases = {quoted(cases)} AND scoring = {quoted(scoring)}"
    rows = results.rows(f"SELECT * FROM paper_a_table5 WHERE {where} ORDER BY operation, k DESC")
    effects = results.rows(f"SELECT * FROM maskkeep_effects WHERE {where} AND operation = 'all'")
    table = [_row(row, effects) for row in rows if row["operation"] == "all"]
    operations = [{name: row[name] for name in PER_OPERATION} for row in rows if row["operation"] != "all"]
    verdict = _verdict(effects, cases)
    queries = (
        f"SELECT * FROM paper_a_table5 WHERE {where} AND operation = 'all' ORDER BY k DESC",
        f"SELECT mode, ranking, seed, k, accuracy, decrease, low, high FROM maskkeep_effects WHERE {where}"
        " AND operation = 'all' ORDER BY mode, k, ranking, seed",
        "SELECT * FROM maskkeep_neurons WHERE run_id = $run AND ranking = 'top' AND place <= 10 LIMIT 20",
    )
    return Summary(
        parts=[
            Shown(f"Relative accuracy decrease (%), over all operations ({cases}, {scoring})", table, _percent(table)),
            Shown(
                "The same by operation; coef: how much smaller the coefficients (%)", operations, _percent(operations)
            ),
            verdict,
        ],
        data={**asked, "table": table, "operations": operations, "verdict": verdict},
        queries=[results.query(query) for query in queries],
    )


def _percent(rows: Sequence[Row]) -> dict[str, str]:
    return dict.fromkeys({name for row in rows for name in row} - {"operation", "k", "prompts"}, "")


def _row(found: Row, effects: Sequence[Row]) -> Row:
    row: dict[str, Any] = {"k": found["k"], "prompts": found["prompts"]}
    for mode in ("mask", "keep"):
        low, high = found[f"{mode}_low"], found[f"{mode}_high"]
        draws = [
            effect["decrease"]
            for effect in effects
            if (effect["mode"], effect["ranking"], effect["k"]) == (mode, "random", found["k"])
            and effect["seed"] is not None
            and effect["decrease"] is not None
        ]
        row[mode] = found[mode]
        row |= {f"{mode} low": low, f"{mode} high": high}
        row[f"{mode} random"] = found[f"{mode}_random"]
        row |= {f"{mode} least": min(draws, default=None), f"{mode} most": max(draws, default=None)}
    return {**row, "coef": found["coef"]}


def _verdict(effects: Sequence[Row], cases: str) -> str:
    """What the fewest neurons masked and the most neurons kept cost, beside random ones."""
    found = {
        (row["mode"], row["ranking"], row["k"]): row
        for row in effects
        if row["ranking"] != "random" or row["seed"] is None
    }
    ks = sorted({row["k"] for row in effects})
    if not ks:
        return f"No prompt counts: there are no cases '{cases}'."
    if found["mask", "top", ks[0]]["decrease"] is None:
        return "The unchanged model is never right: there is no accuracy to lose."
    parts = []
    for mode, k, said in (
        ("mask", ks[0], f"Zeroing each prompt's first {ks[0]} neurons"),
        ("keep", ks[-1], f"keeping only its first {ks[-1]} in the deep layers"),
    ):
        words = f"{said} costs {100 * found[mode, 'top', k]['decrease']:.1f} % of the accuracy"
        if (mode, "random", k) in found:
            excess = found[mode, "excess", k]
            words += f" ({100 * found[mode, 'random', k]['decrease']:.1f} % with random ones of the same layers"
            if excess["low"] is not None:
                words += f"; 95 % interval of the difference {100 * excess['low']:.1f} to {100 * excess['high']:.1f}"
            words += ")"
        parts.append(words)
    return "; ".join(parts) + "."
