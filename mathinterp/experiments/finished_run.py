"""A finished run that ranks heads or neurons, found for what is built on its ranking.

Knows the store's views and asks experiments how they rank; knows nothing about models or how rows were computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.gates import shortened
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.store import Store


@dataclass(frozen=True)
class HeadRanking:
    """How an experiment's finished runs rank heads: SQL with the parameters ``$run`` and ``$operation``.

    ranked: columns layer and head, most important first. Without ``$operation``: there is one ranking for all.
    key: columns layer and head of the heads that matter, which no random control may hold: those of ``$operation``,
        and of any other where that is significant.
    """

    ranked: str
    key: str

    @property
    def by_operation(self) -> bool:
        """Whether each operation has a ranking of its own."""
        return "$operation" in self.ranked


def finished_run(store: Store, run_id: str, ranked: str, scans: Iterable[str]) -> dict[str, Any]:
    """A run's row of ``runs`` without its parameters.

    Args:
        ranked: what the run has to rank, "heads" or "neurons".
        scans: the kinds of scan that rank them.
    Raises UserError if there is no such run, it is another kind of scan, or it is not finished.
    """
    found = store.rows(
        """SELECT * EXCLUDE (parameters), (parameters ->> 'decide') IS NOT NULL AS adaptive
           FROM runs WHERE run_id = $run""",
        {"run": run_id},
    )
    if not found:
        raise UserError(
            f"no run '{shortened(run_id)}' in {store.url}; see: mathinterp sql"
            ' "SELECT run_id, scan, model, prompts, status FROM runs"'
        )
    run = found[0]
    if run["scan"] not in scans:
        known = ", ".join(f"'{name}'" for name in scans)
        raise UserError(f"run {run_id} is a scan of {run['scan']}, which ranks no {ranked}; take one of {known}")
    if run["status"] != "finished":
        raise UserError(
            f"run {run_id} has {run['shards_done']} of {run['shards']} shards: a ranking of some {ranked} would"
            " mislead; finish it with the same command"
        )
    if run.pop("adaptive"):
        raise UserError(
            f"run {run_id} decided of each node by itself (`decide`), on prompts of its own number: that is no ranking;"
            " take a run without it, or name the nodes that its view of decisions has above the threshold"
        )
    return run


def ranking_from(store: Store, run_id: str, operation: str = "all") -> tuple[Head, ...]:
    """The heads of a finished run, most important first, under one operation, as its experiment ranks them.

    Raises UserError if there is no such run, it is not finished, or it ranks no heads (under this operation).
    """
    scan, how = _head_ranking(store, run_id)
    if operation != "all" and not how.by_operation:
        raise UserError(f"a scan of {scan} ranks over all operations; leave out `rank_operation`")
    heads = _heads(store, how.ranked, run_id, operation)
    if not heads:
        raise UserError(f"run {run_id} has no effects of heads for operation '{operation}'")
    return heads


def key_heads_from(store: Store, run_id: str, operation: str = "all") -> tuple[Head, ...]:
    """The key heads of a finished run, which no random control may hold, layer by layer.

    Raises UserError as ``ranking_from`` does.
    """
    _, how = _head_ranking(store, run_id)
    return tuple(sorted(set(_heads(store, how.key, run_id, operation))))


def _head_ranking(store: Store, run_id: str) -> tuple[str, HeadRanking]:
    from mathinterp.experiments.registry import experiments

    known = {name: experiment.head_ranking for name, experiment in experiments().items()}
    ranked = {name: how for name, how in known.items() if how is not None}
    scan = finished_run(store, run_id, "heads", ranked)["scan"]
    return scan, ranked[scan]


def _heads(store: Store, sql: str, run_id: str, operation: str) -> tuple[Head, ...]:
    rows = store.rows(sql, {"run": run_id, "operation": operation})
    return tuple(Head(row["layer"], row["head"]) for row in rows)
