"""What a finished adaptive scan says: which nodes are above the threshold, which are not, after how few cells."""

from mathinterp.experiments.results import Results, Row, Shown, Summary

SHOWN = 20  # nodes above the threshold, largest estimates first
NAME = "CASE node WHEN 'head' THEN layer || '.' || head ELSE 'mlp ' || layer END"


def decided(results: Results) -> bool:
    """Whether the run is one that decides."""
    return results.run is not None and results.run["parameters"].get("decide") is not None


def summarize_decisions(results: Results, view: str, word: str, unit: str = "points") -> Summary:
    """The verdict in one sentence, and the nodes that are above, with anytime-valid intervals.

    Args:
        view: of decisions.
        word: what a node is called, in the singular.
        unit: of 100 * estimate.
    """
    rows = results.rows(
        f"""SELECT {NAME} AS node, decision, exact, prompts_used, prompts_run, cells, e_above, e_below, estimate, low,
                   high
            FROM decisions WHERE run_id = $run ORDER BY estimate DESC, layer, head NULLS LAST"""
    )
    (rule,) = results.rows(
        """SELECT (parameters ->> 'decide')::DOUBLE AS decide, (parameters ->> 'fdr')::DOUBLE AS fdr
           FROM runs WHERE run_id = $run"""
    )
    above = [row for row in rows if row["decision"] == "above"]
    columns = ("node", "estimate", "low", "high", "prompts_used", "exact")
    shown = [{name: row[name] for name in columns} for row in above[:SHOWN]]
    more = f", the first {SHOWN} of {len(above)}" if above[SHOWN:] else ""
    title = f"Drops surely above {rule['decide']:g} {unit} (interval holds at every look){more}"
    verdict = _verdict(rows, rule, word, unit) if rows else "Nothing is decided yet: the same command goes on."
    whole = f"A full scan takes over what was computed here: the same without `decide`, and `reuse` {results.run_id}."
    return Summary(
        parts=[
            *([Shown(title, shown, dict.fromkeys(("estimate", "low", "high"), unit))] if shown else []),
            verdict, *([whole] if rows else []),
        ],
        data={
            "verdict": verdict,
            "threshold": rule["decide"] / 100,
            "fdr": rule["fdr"],
            "above": [row["node"] for row in above],
            "not_above": sum(row["decision"] == "not above" for row in rows),
            "open": sum(row["decision"] == "open" for row in rows),
            "cells_run": sum(row["prompts_run"] for row in rows),
            "cells_used": sum(row["prompts_used"] for row in rows),
            "cells": sum(row["cells"] for row in rows),
            "decisions": rows,
        },
        queries=[results.query(f"SELECT * FROM {view} WHERE run_id = $run ORDER BY estimate DESC LIMIT 10")],
    )  # fmt: skip


def _verdict(rows: list[Row], rule: Row, word: str, unit: str) -> str:
    above, not_above, left = (sum(row["decision"] == word for row in rows) for word in ("above", "not above", "open"))
    run, used, cells = (sum(row[name] for row in rows) for name in ("prompts_run", "prompts_used", "cells"))
    subject = f"{above} {word}{'' if above == 1 else 's'} {'drops' if above == 1 else 'drop'}"
    undecided = f", {left} stay open" if left else ""
    early = f" ({run - used:,} of them began before they were known to be needed)" if run > used else ""
    return (
        f"{subject} by more than {rule['decide']:g} {unit}, {not_above} {'does' if not_above == 1 else 'do'} not"
        f"{undecided}, at {100 * rule['fdr']:g} % FDR, after {100 * run / cells:.2g} % of the cells{early}."
    )
