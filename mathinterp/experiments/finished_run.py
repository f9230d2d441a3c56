"""A finished run that ranks heads or neurons, found for what is built on its ranking.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Iterable
from typing import Any

from mathinterp.errors import UserError
from mathinterp.store import Store


def finished_run(store: Store, run_id: str, ranked: str, scans: Iterable[str]) -> dict[str, Any]:
    """A run's row of ``runs`` without its parameters.

    Args:
        ranked: what the run has to rank, "heads" or "neurons".
        scans: the kinds of scan that rank them.
    Raises UserError if there is no such run, it is another kind of scan, or it is not finished.
    """
    runs = {row["run_id"]: row for row in store.rows("SELECT * EXCLUDE (parameters) FROM runs")}
    if run_id not in runs:
        raise UserError(
            f"no run '{run_id}' in {store.url}; see: mathinterp sql"
            ' "SELECT run_id, scan, model, prompts, status FROM runs"'
        )
    run = runs[run_id]
    if run["scan"] not in scans:
        known = ", ".join(f"'{name}'" for name in scans)
        raise UserError(f"run {run_id} is a scan of {run['scan']}, which ranks no {ranked}; take one of {known}")
    if run["status"] != "finished":
        raise UserError(
            f"run {run_id} has {run['shards_done']} of {run['shards']} shards: a ranking of some {ranked} would"
            " mislead; finish it with the same command"
        )
    return run
