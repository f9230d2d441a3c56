"""What a finished knock-out says, from the stored rows alone; and a ranking of heads from an earlier run.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from dataclasses import dataclass
from typing import Any

from mathinterp.errors import UserError
from mathinterp.experiments.ablation_summary import SIGNIFICANT
from mathinterp.experiments.finished_run import finished_run
from mathinterp.experiments.thin_means import thin_mean_warnings
from mathinterp.models.units import Head
from mathinterp.store import Store

MOST_NAMED = 4  # heads named in a row of the curve's table
RANKINGS = {
    "heads": "head_effects WHERE {where} ORDER BY round(drop, 12) DESC, logprob_change, layer, head",
    "paths": "path_effects WHERE {where} AND node = 'head' ORDER BY mean, layer, head",
    "iterative": "iterative_scan WHERE run_id = '{run_id}' AND masked ORDER BY step",
}  # scan -> its heads, most important first
KEY_HEADS = {
    "heads": "head_effects WHERE run_id = '{run_id}' AND drop > 0.05 AND {counts}",
    "paths": "path_effects WHERE run_id = '{run_id}' AND node = 'head' AND key AND {counts}",
    "iterative": "iterative_scan WHERE run_id = '{run_id}' AND masked",
}  # scan -> its key heads: an effect below -5 %; of iterative masking all that it took


@dataclass(frozen=True)
class KnockoutSummary:
    """The answer of a knock-out; accuracies in per cent, of operation 'all' where none is named.

    curve: one row a k: the heads that came in, accuracy under the ranking and the controls (mean, least to most of the
        seeds), and under the ranking per operation.
    summary: one row an operation and control: where accuracy has halved, area between.
    examples: sentence -> one row a k: the likeliest next tokens with their probabilities.
    warnings: what makes the figures doubtful, a line each.
    """

    curve: list[dict[str, Any]]
    summary: list[dict[str, Any]]
    examples: dict[str, list[dict[str, Any]]]
    verdict: str
    warnings: list[str]
    queries: list[str]


def ranking_from(store: Store, run_id: str, operation: str = "all") -> tuple[tuple[int, int], ...]:
    """The heads of a finished run, most important first, under one operation.

    A head scan: by drop of accuracy (ties: of log-probability), a path scan: most negative mean effect first, iterative
    masking: in the order of its steps.
    Raises UserError if there is no such run, it is not finished, or it ranks no heads (under this operation).
    """
    run = finished_run(store, run_id, "heads", RANKINGS)
    if run["scan"] == "iterative" and operation != "all":
        raise UserError("iterative masking ranks over all operations; leave out --rank-operation")
    quoted = operation.replace("'", "''")
    where = f"run_id = '{run_id}' AND operation = '{quoted}'"
    heads = store.rows("SELECT layer, head FROM " + RANKINGS[run["scan"]].format(where=where, run_id=run_id))
    if not heads:
        raise UserError(f"run {run_id} has no effects of heads for operation '{operation}'")
    return tuple(Head(row["layer"], row["head"]) for row in heads)


def key_heads_from(store: Store, run_id: str, operation: str = "all") -> tuple[tuple[int, int], ...]:
    """The key heads of a finished run, which no random control may hold: of ``operation``, and of any other if q < .05.

    Raises UserError as ``ranking_from`` does.
    """
    run = finished_run(store, run_id, "heads", RANKINGS)
    quoted = operation.replace("'", "''")
    counts = f"(operation = '{quoted}' OR q_value < {SIGNIFICANT})"
    heads = KEY_HEADS[run["scan"]].format(run_id=run_id, counts=counts)
    rows = store.rows(f"SELECT DISTINCT layer, head FROM {heads} ORDER BY layer, head")
    return tuple(Head(row["layer"], row["head"]) for row in rows)


def summarize_knockout(store: Store, run_id: str) -> KnockoutSummary:
    """Summarize a finished knock-out."""
    where = f"WHERE run_id = '{run_id}'"
    summary = store.rows(
        f"""SELECT operation, control, 100 * baseline_accuracy AS "original", 100 * lowest_accuracy AS "lowest",
               halved_at, control_halved_at, 100 * mean_gap AS "mean gap", area_between, last_k AS "up to k"
            FROM knockout_summary {where} ORDER BY operation = 'all' DESC, operation, control"""
    )
    curve = _curve(store, where)
    return KnockoutSummary(
        curve=curve,
        summary=summary,
        examples=_examples(store, where),
        verdict=_verdict(curve, summary),
        warnings=[*thin_mean_warnings(store, run_id), *_not_matched(_borrowed(store, where))],
        queries=[
            f"SELECT * FROM knockout_curve {where} AND operation = 'all' ORDER BY ranking, seed, k",
            f"SELECT * FROM knockout_summary {where}",
            f"SELECT * FROM knockout_heads {where} AND ranking = 'effect' ORDER BY k, place",
            *([f"SELECT * FROM knockout_examples {where} ORDER BY ALL"] if _examples(store, where) else []),
        ],
    )


def _curve(store: Store, where: str) -> list[dict[str, Any]]:
    bands = {
        (row["ranking"], row["operation"], row["k"]): row for row in store.rows(f"SELECT * FROM knockout_bands {where}")
    }
    operations = sorted({operation for _, operation, _ in bands} - {"all"})
    controls = sorted({ranking for ranking, _, _ in bands} - {"effect"})
    added, borrowed = _added(store, where), _borrowed(store, where)
    rows = []
    for k in sorted(k for ranking, operation, k in bands if (ranking, operation) == ("effect", "all")):
        row: dict[str, Any] = {
            "k": k,
            "heads": added.get(k, "-"),
            "effect": 100 * bands["effect", "all", k]["accuracy"],
        }
        for control in controls:
            band = bands.get((control, "all", k))
            row[control] = 100 * band["accuracy"] if band else None
            row[f"{control} least-most"] = f"{100 * band['lowest']:.4g}-{100 * band['highest']:.4g}" if band else None
        if controls:
            row["from other layers"] = borrowed.get(k, 0) if k == 0 or (controls[-1], "all", k) in bands else None
        rows.append(row | {op: 100 * bands["effect", op, k]["accuracy"] for op in operations})
    return rows


def _added(store: Store, where: str) -> dict[int, str]:
    """k -> the heads of the ranking that are out at k and not at the k before."""
    heads = store.rows(
        f"""SELECT min(k) AS k, place, layer || '.' || head AS head
            FROM knockout_heads {where} AND ranking = 'effect' GROUP BY ALL ORDER BY place"""
    )
    named: dict[int, list[str]] = {}
    for row in heads:
        named.setdefault(row["k"], []).append(row["head"])
    return {
        k: "+ " + ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
        for k, names in named.items()
    }


def _borrowed(store: Store, where: str) -> dict[int, int]:
    """k -> layer-matched heads that had to come from another layer than the one they stand for."""
    counts = f"SELECT k, layer, count(*) AS n FROM knockout_heads {where} AND seed = 0 AND ranking"
    rows = store.rows(
        f"""SELECT k, sum(greatest(key.n - coalesce(drawn.n, 0), 0))::INTEGER AS borrowed
            FROM ({counts} = 'effect' GROUP BY ALL) AS key
            LEFT JOIN ({counts} = 'random_layer' GROUP BY ALL) AS drawn USING (k, layer)
            WHERE k IN (SELECT k FROM knockout_heads {where} AND ranking = 'random_layer') GROUP BY k ORDER BY k"""
    )
    return {row["k"]: row["borrowed"] for row in rows}


def _not_matched(borrowed: dict[int, int]) -> list[str]:
    """A line if layer-matched heads are not all of the layers that they stand for."""
    short = {k: count for k, count in borrowed.items() if count}
    if not short:
        return []
    named = ", ".join(f"{count} of {k}" for k, count in short.items())
    return [f"random_layer: {named} heads come from other layers, because too few non-key heads are left in their own"]


def _examples(store: Store, where: str) -> dict[str, list[dict[str, Any]]]:
    shown: dict[str, dict[int, dict[str, Any]]] = {}
    for row in store.rows(f"SELECT * FROM knockout_examples {where} ORDER BY sentence, k, rank"):
        line = shown.setdefault(row["sentence"], {}).setdefault(row["k"], {"k": row["k"]})
        line[f"#{row['rank']}"] = f"{row['token']!r} {row['probability']:.3f}"
    return {sentence: list(lines.values()) for sentence, lines in shown.items()}


def _verdict(curve: list[dict[str, Any]], summary: list[dict[str, Any]]) -> str:
    """Where accuracy has halved over all operations, with the heads of the ranking out and with random ones."""
    overall = [row for row in summary if row["operation"] == "all"]
    parts = [f"Over all operations accuracy has halved {_halved(overall[0]['halved_at'], curve[-1]['k'])}"]
    for row in overall:
        if row["control"] is not None:
            where = _halved(row["control_halved_at"], row["up to k"])
            parts.append(f"{row['control']} {where}, {row['mean gap']:.1f} points above it on average")
    return "; ".join(parts) + "."


def _halved(k: int | None, last: int) -> str:
    return f"with {k} head{'s' if k > 1 else ''} out" if k else f"nowhere up to {last}"
