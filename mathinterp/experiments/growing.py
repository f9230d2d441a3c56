"""Runs that grow: which shards there are follows, piece by piece, from the rows of earlier ones.

Knows shards and their rows; knows nothing about replicas or files. The driver owns one such object for a run. What it
gives must be a function of rows alone (``early`` aside, on whose rows nothing may depend), so that a run that was
killed goes on as if it had not been.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from mathinterp.experiments.base import Shard

Read = Callable[[Shard], pa.Table]  # the stored rows of a finished shard


class Growing(ABC):
    """The shards of one run, as far as they are known."""

    closing: Shard  # the driver's own, written last and listed first: no open run looks finished

    @abstractmethod
    def first(self) -> list[Shard]:
        """Shards that depend on no rows."""

    @abstractmethod
    def restore(self, grown: Sequence[Shard], done: Collection[str]) -> None:
        """Take up a run: shards beyond the first that it was given before, and the keys of all that are done.

        Raises UserError for shards that this version would not cut.
        """

    @abstractmethod
    def finished(self, key: str, read: Read) -> list[Shard]:
        """A shard is done: those that can run now and could not before."""

    @abstractmethod
    def follow(self, read: Read) -> list[Shard]:
        """Shards that follow from what is done, and were not given yet."""

    @abstractmethod
    def early(self) -> Shard | None:
        """A shard for a replica that would idle, although rows that may spare it are still to come; None: none."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing more follows."""

    @abstractmethod
    def close(self) -> pa.Table:
        """Rows of the closing shard, once the run is over."""
