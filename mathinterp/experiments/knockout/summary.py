"""What a finished knock-out says: where accuracy has halved, with the ranked heads out and with random ones."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mathinterp.experiments.knockout.compared import other_settings, settings
from mathinterp.experiments.reach import rough_warnings
from mathinterp.experiments.results import Results, Row, Shown, Summary, per_operation
from mathinterp.experiments.thin_means import thin_mean_warnings

MOST_NAMED = 4  # heads named in a row of the curve's table
SUMMARY_UNITS = {"original": "%", "lowest": "%", "mean gap": "points"}


def summarize(results: Results) -> Summary:
    """The curve, where it has halved and the area to the controls per operation, and the sentences' next tokens."""
    (run,) = results.rows("SELECT parameters FROM runs WHERE run_id = $run")
    asked = json.loads(run["parameters"])
    curve = _curve(results)
    if not curve:
        return Summary(data={"ranking": asked["ranking"]})
    summary = results.rows(
        """SELECT operation, control, baseline_accuracy AS original, lowest_accuracy AS lowest,
               halved_at, control_halved_at, mean_gap AS "mean gap", area_between, last_k AS "up to k"
           FROM knockout_summary WHERE run_id = $run ORDER BY operation = 'all' DESC, operation, control"""
    )
    examples, verdict = _examples(results), _verdict(curve, summary)
    warnings = doubts(results)
    return Summary(
        parts=[
            Shown(_title(asked), curve, dict.fromkeys(set(curve[0]) - {"k", "heads", "from other layers"}, "")),
            *other_settings(results, asked),
            Shown("Where accuracy has halved, and the area to the controls", per_operation(summary), SUMMARY_UNITS),
            *(Shown(f"Likeliest next tokens of {sentence!r}", rows) for sentence, rows in examples.items()),
            verdict,
        ],
        data={
            "ranking": asked["ranking"],
            "verdict": verdict,
            "warnings": warnings,
            "curve": curve,
            "summary": summary,
            "examples": examples,
        },
        queries=[
            results.query(
                "SELECT * FROM knockout_curve WHERE run_id = $run AND operation = 'all' ORDER BY ranking, seed, k"
            ),
            results.query("SELECT * FROM knockout_summary WHERE run_id = $run"),
            results.query("SELECT * FROM knockout_heads WHERE run_id = $run AND ranking = 'effect' ORDER BY k, place"),
            *([results.query("SELECT * FROM knockout_examples WHERE run_id = $run ORDER BY ALL")] if examples else []),
        ],
        warnings=warnings,
    )


def doubts(results: Results) -> list[str]:
    """What makes the curve doubtful."""
    prompts = results.rows(
        """SELECT operation, count(DISTINCT prompt_id) AS prompts FROM knockout_prompts WHERE run_id = $run
           GROUP BY operation ORDER BY operation"""
    )
    return [
        *thin_mean_warnings(results.store, results.run_id),
        *_not_matched(_borrowed(results)),
        *rough_warnings(prompts),
    ]


def _title(asked: Mapping[str, Any]) -> str:
    """What is replaced, where, and what counts as right."""
    return f"Accuracy (%), first k heads out ({settings(asked)})"


def _curve(results: Results) -> list[Row]:
    """One row per k: the heads that came in, accuracy under the ranking and the controls, and per operation.

    Of controls the mean over seeds, and the least to the most of them; of operation 'all' where none is named.
    """
    bands = {
        (row["ranking"], row["operation"], row["k"]): row
        for row in results.rows("SELECT * FROM knockout_bands WHERE run_id = $run")
    }
    operations = sorted({operation for _, operation, _ in bands} - {"all"})
    operations = operations if len(operations) > 1 else []  # the same figures as "all"
    controls = sorted({ranking for ranking, _, _ in bands} - {"effect"})
    added, borrowed = _added(results), _borrowed(results)
    rows = []
    for k in sorted(k for ranking, operation, k in bands if (ranking, operation) == ("effect", "all")):
        row: Row = {"k": k, "heads": added.get(k, "-"), "effect": bands["effect", "all", k]["accuracy"]}
        for control in controls:
            band = bands.get((control, "all", k))
            row[control] = band["accuracy"] if band else None
            row |= {f"{control} {end}": band[f"{end}est"] if band else None for end in ("low", "high")}
        if controls:
            row["from other layers"] = borrowed.get(k, 0) if k == 0 or (controls[-1], "all", k) in bands else None
        rows.append(row | {op: bands["effect", op, k]["accuracy"] for op in operations})
    return rows


def _added(results: Results) -> dict[int, str]:
    """k -> the heads of the ranking that are out at k and not at the k before."""
    heads = results.rows(
        """SELECT min(k) AS k, place, layer || '.' || head AS head
           FROM knockout_heads WHERE run_id = $run AND ranking = 'effect' GROUP BY ALL ORDER BY place"""
    )
    named: dict[int, list[str]] = {}
    for row in heads:
        named.setdefault(row["k"], []).append(row["head"])
    return {
        k: "+ " + ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
        for k, names in named.items()
    }


def _borrowed(results: Results) -> dict[int, int]:
    """k -> layer-matched heads that had to come from another layer than the one they stand for."""
    rows = results.rows(
        """WITH counts AS (
               SELECT ranking, k, layer, count(*) AS n FROM knockout_heads WHERE run_id = $run AND seed = 0 GROUP BY ALL
           )
           SELECT k, sum(greatest(ranked.n - coalesce(drawn.n, 0), 0))::INTEGER AS borrowed
           FROM (SELECT * FROM counts WHERE ranking = 'effect') AS ranked
           LEFT JOIN (SELECT * FROM counts WHERE ranking = 'random_layer') AS drawn USING (k, layer)
           WHERE k IN (SELECT k FROM counts WHERE ranking = 'random_layer') GROUP BY k ORDER BY k"""
    )
    return {row["k"]: row["borrowed"] for row in rows}


def _not_matched(borrowed: Mapping[int, int]) -> list[str]:
    """A line if layer-matched heads are not all of the layers that they stand for."""
    short = {k: count for k, count in borrowed.items() if count}
    if not short:
        return []
    named = ", ".join(f"{count} of {k}" for k, count in short.items())
    return [f"random_layer: {named} heads come from other layers, because too few non-key heads are left in their own"]


def _examples(results: Results) -> dict[str, list[Row]]:
    """Sentence -> one row per k: the likeliest next tokens with their probabilities."""
    shown: dict[str, dict[int, Row]] = {}
    for row in results.rows("SELECT * FROM knockout_examples WHERE run_id = $run ORDER BY sentence, k, rank"):
        line = shown.setdefault(row["sentence"], {}).setdefault(row["k"], {"k": row["k"]})
        line[f"#{row['rank']}"] = f"{row['token']!r} {row['probability']:.3f}"
    return {sentence: list(lines.values()) for sentence, lines in shown.items()}


def _verdict(curve: Sequence[Row], summary: Sequence[Row]) -> str:
    """Where accuracy has halved over all operations, with the heads of the ranking out and with random ones."""
    overall = [row for row in summary if row["operation"] == "all"]
    parts = [f"Over all operations accuracy has halved {_halved(overall[0]['halved_at'], curve[-1]['k'])}"]
    for row in overall:
        if row["control"] is not None:
            where = _halved(row["control_halved_at"], row["up to k"])
            gap = 100 * row["mean gap"]
            parts.append(
                f"{row['control']} {where}, {abs(gap):.1f} points {'below' if gap < 0 else 'above'} it on average"
            )
    return "; ".join(parts) + "."


def _halved(k: int | None, last: int) -> str:
    return f"with {k} head{'s' if k > 1 else ''} out" if k else f"nowhere up to {last}"
