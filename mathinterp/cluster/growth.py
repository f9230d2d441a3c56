"""A run whose shards follow from rows, for the dispatcher: rows are read from the store, growth is kept in the record.

Knows shards, files and records; knows nothing about what rows say (experiments/growing.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from mathinterp.experiments.base import Shard
from mathinterp.experiments.growing import Growing
from mathinterp.store import Run, Store


class Growth:
    """What the driver holds of a growing run; the dispatcher's ``Source``.

    Args:
        growing: of the run's experiment.
        evaluations: shards -> their keys and forward evaluations.

    Attributes:
        known: all shards that replicas compute; those that follow are added.
        evaluations: of these, by key.
        closed: whether the run's closing shard was written.
    """

    def __init__(
        self, growing: Growing, run: Run, store: Store, evaluations: Callable[[Sequence[Shard]], dict[str, int]]
    ):
        self._growing, self._run, self._store, self._count = growing, run, store, evaluations
        self.known = [*growing.first(), *(Shard(**shard) for shard in run.record.get("grown", []))]
        self.evaluations, self.closed = evaluations(self.known), False

    def missing(self) -> list[Shard]:
        """Those to run now, after what the store has was taken up."""
        done = self._run.done_shards()
        first = len(self._growing.first())
        self._growing.restore(self.known[first:], done - {self._growing.closing.key})
        self._grow(self._growing.follow(self._read))
        return [shard for shard in self.known if shard.key not in done]

    def finished(self, shard: Shard) -> Sequence[Shard]:
        """See Source."""
        return self._grow(self._growing.finished(shard.key, self._read))

    def early(self) -> Shard | None:
        """See Source."""
        shard = self._growing.early()
        if shard is not None:
            self._grow([shard])
        return shard

    def _grow(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        if shards:
            self._run.grow([asdict(shard) for shard in shards])
            self.known += shards
            self.evaluations |= self._count(shards)
        return shards

    def close(self, metadata: dict[str, Any]) -> None:
        """Write the closing shard, if the run is over."""
        if self._growing.over:
            closing = self._growing.closing
            self._store.write_shard(self._run.run_id, closing.table, closing.index, self._growing.close(), metadata)
            self.closed = True

    def _read(self, shard: Shard) -> pa.Table:
        return self._store.read_shard(self._run.run_id, shard.key)
