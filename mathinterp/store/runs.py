"""Whole runs of a store: ``store.runs.list()``, ``show``, ``compare``, ``delete``, ``export``, ``check``, ``compact``.

All of it from the store alone, which is what is left when the machine that drove a run is lost. Knows records, files
and SQL; knows no experiment by name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError, did_you_mean
from mathinterp.store.manifest import RUN_ID, read_record

if TYPE_CHECKING:
    from mathinterp.store.compacting import Compacted
    from mathinterp.store.comparing import Comparison
    from mathinterp.store.deleting import Deletion
    from mathinterp.store.exporting import Exported
    from mathinterp.store.faults import Faults
    from mathinterp.store.files import StoreFiles
    from mathinterp.store.run_list import RunCard, RunRow
    from mathinterp.store.store import Store


class Runs:
    """What can be done with whole runs of a store; each method is a function of a module of its own."""

    def __init__(self, store: "Store"):
        self._store = store

    def record(self, run: str) -> dict[str, Any]:
        """The record of a run; raises UserError, with a likely id, if there is none that can be read."""
        if RUN_ID.fullmatch(run):
            try:
                record = read_record(self._store.files, run, now=True)
            except ValueError as error:
                raise UserError(f"runs/{run}.json: {error}; see `mathinterp runs check`") from error
            if record is not None:
                return record
        raise UserError(f"there is no run '{run}' in {self._store.url}.{alike(self._store.files, run)}")

    def present(self, run: str) -> tuple[dict[str, Any], set[str]]:
        """The record of a run and its shards that are there, of one moment, whatever is merged or deleted meanwhile."""
        while True:
            record = self.record(run)
            there = self._store.finished_shards(run, record)
            if self.record(run)["shards"] == record["shards"]:
                return record, there

    def list(
        self, *, scan: str | None = None, model: str | None = None, status: str | None = None
    ) -> "Sequence[RunRow]":
        """The runs, the newest first; those of a scan, of models with a text in their name, or of a status alone."""
        from mathinterp.store.run_list import list_runs

        return list_runs(self._store, scan, model, status)

    def show(self, run: str) -> "RunCard":
        """All that is known of one run."""
        from mathinterp.store.run_list import show_run

        return show_run(self._store, run)

    def compare(self, run: str, other: str) -> "Comparison":
        """What differs between two runs: what they were asked, what computed them, and their rows."""
        from mathinterp.store.comparing import compare

        return compare(self._store, run, other)

    def deletion(self, run: str, *, after: Sequence[str] = ()) -> "Deletion":
        """What ``delete`` would free; nothing is changed.

        Args:
            after: runs that are deleted before it, whose prompts it may then have to itself.
        """
        from mathinterp.store.deleting import deletion

        return deletion(self._store, run, after)

    def delete(self, run: str, *, force: bool = False) -> "Deletion":
        """Free a run: its record, rows and temporary files, and the prompts that no other run has.

        Args:
            force: also if it is not finished and was written to a short while ago, so that a driver may be at work.
        Raises:
            UserError: there is nothing of such a run, or a driver may be at work on it.
        """
        from mathinterp.store.deleting import delete

        return delete(self._store, run, force=force)

    def export(
        self, run: str, path: str | Path, *, view: str | None = None, force: bool = False
    ) -> "Sequence[Exported]":
        """Write a run's rows to a .parquet or .csv file, with what they are: in its footer, or in a .json beside it.

        Args:
            view: a table or view with rows of runs or of prompts; None: each table of the run, a file each, as SQL
                shows it: rows of distractors are in views of logit differences.
            force: replace files that are there.
        Raises UserError; a file is there whole or not at all.
        """
        from mathinterp.store.exporting import export_run

        return export_run(self._store, run, Path(path), view, force)

    def check(self, runs: Sequence[str] | None = None) -> "Faults":
        """Read the files of some runs, or of all, to their end: what is wrong, and what mends it."""
        from mathinterp.store.faults import find_faults

        return find_faults(self._store, runs)

    def compact(self, run: str) -> "Compacted":
        """Merge the small files of a finished run; see compacting.py."""
        from mathinterp.store.compacting import compact

        return compact(self._store, run)


def run_of(name: str) -> str:
    """The run whose record a file of that name is."""
    return name.removeprefix("runs/").removesuffix(".json")


def recorded(files: "StoreFiles") -> list[str]:
    """Ids of all runs with a record, readable or not; what others put beside them is none."""
    return [run for name in files.find("runs", ".json") if RUN_ID.fullmatch(run := run_of(name))]


def alike(files: "StoreFiles", run: str) -> str:
    """Ends a message about a run that is not there."""
    return f"{did_you_mean(run, recorded(files))} `mathinterp runs list` has all"
