"""Whether the means of a mean ablation are over enough prompts to be called means.

Knows the store's views; knows nothing about models or how rows were computed. The fewest and most prompts of any mean
are in the run's notes too, as prompts_per_mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mathinterp.store import Store

THIN = 2  # a mean over so few prompts, or fewer, is told of


def thin_mean_warnings(store: Store, run_id: str) -> list[str]:
    """One line if means of a head, MLP or knock-out run are over 1 or 2 prompts; empty for other ablations.

    At END a mean is over the prompts of one operation and template, at all tokens or of dataset_mean over all prompts.
    """
    own = "parameters ->> 'positions' = 'end' AND parameters ->> 'ablation' = 'mean'"
    group = f"CASE WHEN {own} THEN (operation, template) END"
    (counts,) = store.rows(
        f"""SELECT count(*) FILTER (n <= {THIN}) AS thin, count(*) AS prompts, any_value(own) AS own FROM (
                SELECT count(*) OVER (PARTITION BY {group}) AS n, {own} AS own
                FROM runs JOIN prompts USING (prompts_fingerprint)
                WHERE run_id = $run AND parameters ->> 'ablation' IN ('mean', 'dataset_mean'))""",
        {"run": run_id},
    )
    if not counts["thin"]:
        return []
    of = "of one operation and template " if counts["own"] else ""
    return [
        f"mean ablation: {counts['thin']} of {counts['prompts']} prompts get a mean over only 1 or {THIN} prompts {of}"
        "(prompts_per_mean in the run's notes), which is hardly a mean; give more prompts, for example a larger `limit`"
    ]
