"""Whether a knock-out can be laid beside the head scans of its model: ablation, position and scoring must be the same.

Knows stored parameters; knows nothing about models or how rows were computed.
"""

from collections.abc import Mapping
from typing import Any

from mathinterp.experiments.results import Results

SETTINGS = ("ablation", "positions", "scoring")


def settings(asked: Mapping[str, Any]) -> str:
    """What is replaced, where, and what counts as right, in words."""
    where = "END" if asked["positions"] == "end" else "all tokens"
    return f"{asked['ablation']} ablation at {where}; right by {asked['scoring']}"


def other_settings(results: Results, asked: Mapping[str, Any]) -> list[str]:
    """A line if the latest finished head scan of the same model measured otherwise: the figures do not compare.

    Names what the first ranked head costs there alone, and how to measure alike.
    """
    found = results.rows(
        """SELECT s.run_id, s.parameters ->> 'ablation' AS ablation, s.parameters ->> 'positions' AS positions,
               s.parameters ->> 'scoring' AS scoring, e.drop
           FROM runs AS own JOIN runs AS s USING (model_fingerprint)
           LEFT JOIN head_effects AS e
               ON e.run_id = s.run_id AND e.operation = 'all' AND e.layer || '.' || e.head = $head
           WHERE own.run_id = $run AND s.scan = 'heads' AND s.status = 'finished'
           ORDER BY s.finished_at DESC LIMIT 1""",
        head=asked["ranking"][0],
    )
    if not found or all(found[0][name] == asked[name] for name in SETTINGS):
        return []
    (scan,) = found
    alone = "" if scan["drop"] is None else f", where {asked['ranking'][0]} alone costs {100 * scan['drop']:.1f} points"
    alike = ", ".join(f"`{name}` {scan[name]}" for name in SETTINGS if scan[name] != asked[name])
    return [
        f"Not to be compared with head scan {scan['run_id']} ({settings(scan)}{alone}): this knock-out measures"
        f" otherwise ({settings(asked)}); with {alike} it would measure alike."
    ]
