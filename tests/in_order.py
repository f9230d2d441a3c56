"""Which of two processes runs a test: neighbours of one file stay together, and what is collected last begins last.

conftest.py sorts tests by what they do with Ray, so that a file may have neighbours at several places; xdist's own
``loadscope`` would run them all where the first ones are.
"""

from collections.abc import Sequence
from itertools import groupby

from xdist.scheduler import LoadScopeScheduling


def neighbours(tests: Sequence[str]) -> dict[str, str]:
    """Of each test the name of those in a row, of its file, that it is one of."""
    rows = groupby(tests, key=lambda test: test.split("::")[0])
    return {test: f"{file} {number}" for number, (file, row) in enumerate(rows) for test in row}


class InOrder(LoadScopeScheduling):
    """``--dist loadscope`` by such rows; with ``--no-loadscope-reorder`` in the order of collection."""

    def schedule(self) -> None:
        """As of the base class, which asks for the scope of every test."""
        if self.collection is None:
            self._rows = neighbours(next(iter(self.registered_collections.values())))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._rows[nodeid]
