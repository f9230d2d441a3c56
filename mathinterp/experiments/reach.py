"""What accuracy can tell: whether it can rank at all, and which q-values a number of prompts can reach.

Knows an ablation's effects; knows nothing about models or how rows were computed.
"""

import math
from collections.abc import Sequence

from mathinterp.experiments.results import SIGNIFICANT, Results, Row

CEILING = 0.98  # of the unedited model, over which a drop is not ranked if no node leaves it
ROUGH = 12  # prompts of an operation, under which intervals hold but are wide (docs/statistics.md)
LEAST_RANKED = 0.02  # the largest drop under which accuracy ranks nothing: paper A counts those under 2 points as none


def prompts_of(results: Results) -> list[Row]:
    """Operation and prompts, of each operation of a run with a baseline."""
    return results.rows(
        "SELECT operation, prompts FROM accuracies WHERE run_id = $run AND operation <> 'all' ORDER BY operation"
    )


def smallest_q(prompts: int | Sequence[int], tests: int) -> float:
    """The least q-value of a drop that one node alone can have: every prompt falls (score_p in functions.sql).

    Args:
        prompts: of one operation, or of each of several whose mean is tested.
        tests: nodes that are tested together.
    """
    each = [prompts] if isinstance(prompts, int) else list(prompts)
    variance = sum((1 + 0.3 / (n + 1)) / n for n in each) / len(each) ** 2
    return min(1.0, tests * math.erfc(math.sqrt(1 / (2 * variance))))


def prompts_needed(tests: int) -> int:
    """The fewest prompts with which one node alone can have a q-value under SIGNIFICANT."""
    return next(n for n in range(1, 10_000) if smallest_q(n, tests) < SIGNIFICANT)


def noise_warnings(results: Results) -> list[str]:
    """A line if a run did not note what a change of nothing does: then no effect is called sure."""
    run = results.run
    if run is None or run["notes"].get("noise_floor") is not None:
        return []
    return ["the run's noise floor is not known, so that no effect is called sure; another `store` computes it anew"]


def rough_warnings(prompts: Sequence[Row]) -> list[str]:
    """A line if some operation has so few prompts (pairs) that its figures are rough."""
    few = [f"'{row['operation']}' ({row['prompts']})" for row in prompts if row["prompts"] < ROUGH]
    if not few:
        return []
    return [
        f"rough figures: under {ROUGH} prompts for operation {', '.join(few)}; intervals are wide, few effects are sure"
    ]


def reach_warnings(prompts: Sequence[Row], tests: int, word: str) -> list[str]:
    """A line if some operation has too few prompts for a q-value under SIGNIFICANT.

    Args:
        prompts: rows of operation and prompts.
        tests: nodes that are tested together.
    """
    short = [
        f"'{row['operation']}' ({row['prompts']} prompts: q {q:.2g} at best)"
        for row in prompts
        if (q := smallest_q(row["prompts"], tests)) >= SIGNIFICANT
    ]
    whole = smallest_q([row["prompts"] for row in prompts], tests) if prompts else 0.0
    if len(prompts) > 1 and whole >= SIGNIFICANT:
        short.append(f"'all' (q {whole:.2g} at best)")
    if not short:
        return []
    return [
        f"too few prompts for q < {SIGNIFICANT}: one {word} of {tests} alone cannot reach it for operation"
        f" {', '.join(short)}; it takes {prompts_needed(tests)} prompts of an operation, so give a larger `limit`"
    ]


def unrankable(results: Results, view: str) -> dict[str, str]:
    """Operation -> why accuracy ranks nothing there; of 'all' only where that holds of every operation.

    At or below chance (one guess in as many tokens, or whole answers, as are gold in the operation; within its 95 %
    interval), or so near 100 % that no node costs LEAST_RANKED.

    Args:
        view: of effects, with operation, baseline_accuracy, drop and n.
    """
    rows = results.rows(
        f"""SELECT operation, any_value(baseline_accuracy) AS baseline, max(drop) AS most, any_value(n) AS n, chance
            FROM (SELECT * FROM {view} WHERE run_id = $run) LEFT JOIN ({CHANCE}) USING (operation)
            GROUP BY operation, chance"""
    )
    found = {row["operation"]: why for row in rows if row["operation"] != "all" and (why := _why(row))}
    if found and len(found) == sum(row["operation"] != "all" for row in rows):
        found["all"] = "in no operation"
    return found


CHANCE = """
    SELECT operation, avg(1.0 / kinds) AS chance FROM (
        SELECT operation, count(DISTINCT gold) OVER (PARTITION BY operation, position) AS kinds FROM (
            SELECT b.operation, CASE WHEN b.scoring = 'exact_match' THEN 0 ELSE b.position END AS position,
                   CASE WHEN b.scoring = 'exact_match' THEN p.answer ELSE t.token_id::VARCHAR END AS gold
            FROM scored_baseline AS b JOIN run_records AS r USING (run_id)
            JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = b.prompt_id
            JOIN answer_tokens AS t ON t.prompts_fingerprint = r.prompts_fingerprint AND t.prompt_id = b.prompt_id
                                   AND t.position = b.position
            WHERE b.run_id = $run
        )
    ) GROUP BY operation"""


def _why(row: Row) -> str | None:
    baseline, chance = row["baseline"], row["chance"]
    if chance is not None and chance < 1:
        margin = 1.96 * math.sqrt(chance * (1 - chance) / row["n"])
        if baseline <= chance + margin and baseline < CEILING:
            return f"{100 * baseline:.3g} % right without any of them out, no more than chance ({100 * chance:.3g} %)"
    elif baseline == 0:
        return "never right, whatever is out"
    if baseline >= CEILING and row["most"] < LEAST_RANKED:
        return f"{100 * baseline:.4g} % right, and nothing that is out costs {100 * LEAST_RANKED:.0f} points"
    return None
