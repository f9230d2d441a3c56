"""How runs are shown on a terminal: rows of a list, a card, differences, what would be deleted, what mends a fault."""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.completing import run_id
from mathinterp.cli.options import Command, apply
from mathinterp.cli.output import print_line, print_table, store_option
from mathinterp.errors import UserError
from mathinterp.text import counted
from mathinterp.versions import is_command

if TYPE_CHECKING:
    from mathinterp.store import Store
    from mathinterp.store.comparing import Comparison, TableDifference
    from mathinterp.store.deleting import Deletion
    from mathinterp.store.faults import Fault
    from mathinterp.store.integrity import Checked
    from mathinterp.store.run_list import RunCard, RunRow

LONG = 300  # characters: longer notes, of probes for example, are in the JSON alone


def page_options() -> Callable[[Command], Command]:
    """--run, --compare: what is on a page."""
    return apply(
        [
            click.option(
                "--run", "run_ids", multiple=True, shell_complete=run_id,
                help="Run to show; may be repeated. Default: all that are finished.",
            ),
            click.option(
                "--compare", nargs=2, default=None, metavar="RUN RUN", shell_complete=run_id,
                help="Two runs to put side by side, on top.",
            ),
        ]
    )  # fmt: skip


def opened_store(url: str) -> "Store":
    """The store of that path or URL; raises UserError where there is none."""
    from mathinterp.store import Store

    opened = Store(url)
    opened.require_files()
    return opened


def shown_row(row: "RunRow") -> dict[str, Any]:
    """A run as a row of a table."""
    from mathinterp.store.run_list import age

    return {
        "run": row.run_id,
        "scan": row.scan,
        "model": row.model,
        "prompts": row.prompts,
        "dtype": row.dtype,
        "status": row.status,
        "shards": f"{row.shards_done}/{row.shards}",
        "files": row.files,
        "rows": row.rows,
        "size": written_bytes(row.bytes),
        "started": row.started_at[:16].replace("T", " "),
        "age": ago(max(age(row.started_at), 0.0)),  # a clock that was ahead
        "written": None if row.last_write is None else f"{ago(row.last_write)} ago",
    }


def facts(card: "RunCard") -> Iterable[tuple[str, Any]]:
    """Name and value of all that is known of a run, in the order in which people ask."""
    yield from shown_row(card.run).items()
    yield "model fingerprint", card.model_fingerprint
    yield "prompts fingerprint", card.prompts_fingerprint
    yield "parameters", card.parameters
    yield "code", card.code_version
    for each in card.versions:
        yield "versions", ", ".join(f"{name} {value}" for name, value in each.items())
    yield "hosts", ", ".join(card.hosts)
    yield "seconds", card.wall_seconds
    yield "command", card.command
    for name, value in card.notes.items():
        if len(str(value)) <= LONG:
            yield name.replace("_", " "), moment(value) if name == "model_loaded_at" else value


def moment(seconds: float) -> str:
    """As ``started`` is written."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def print_difference(table: "TableDifference", run: str, other: str) -> None:
    """How the rows of one table differ between two runs, column by column."""
    how = f"{table.in_both:,} rows in both by {', '.join(table.key)}"
    alone = [f"{count:,} only in {which}" for which, count in zip((run, other), table.only_in, strict=True)]
    repeated = "; keys repeat, rows of one key are paired in order" if table.repeated else ""
    title = f"{table.table}: {'; '.join([how, *alone])}{repeated}"
    if table.columns and table.in_both:
        print_table(
            [
                {"column": each.column, "equal": each.equal, "different": each.cells - each.equal,
                 "largest_difference": each.largest, "flips": each.flips, "not_finite": each.not_finite}
                for each in table.columns
            ],
            title=title,
        )  # fmt: skip
    else:
        print_line(title)


def verdict(found: "Comparison") -> str:
    """Whether rows differ, in a sentence."""
    skipped = (
        f" Not compared: {', '.join(found.skipped)} (of experiments that are not installed)." if found.skipped else ""
    )
    lacking = [f"{run} {lack}" for run, lack in zip(found.runs, found.incomplete, strict=True) if lack]
    if found.differing:
        said = f"Rows differ in {', '.join(found.differing)}"
    elif not lacking:
        said = "All values are the same" if found.other_prompts else "All rows are the same"
    elif any(table.in_both for table in found.tables):
        said = "No difference in the rows that are there in both"
    else:
        said = "No rows are there in both"
    if found.other_prompts:
        count = f"{found.other_prompts:,} (their rows are paired by id alone)"
        lacking.insert(0, f"prompt ids that are other prompts in the two runs: {count}")
    return "; ".join([said, *lacking]) + "." + skipped


def print_planned(planned: Sequence["Deletion"]) -> None:
    """What a deletion would take away, and what it leaves."""
    rows = [
        {"run": each.run_id, "scan": each.scan, "status": each.status, "files": len(each.files),
         "size": written_bytes(each.bytes), "prompts": f"go too ({len(each.prompts)} files)" if each.prompts
         else f"stay: {each.kept_prompts}" if each.kept_prompts else "none"}
        for each in planned
    ]  # fmt: skip
    print_table(rows, title="To be deleted")
    for each in planned:
        if each.needed_by:
            print_line(f"{each.run_id} is named in the parameters of {', '.join(each.needed_by)}, whose rows stay.")
        for name in each.left:
            print_line(f"{name} is a link or no regular file; it is left alone.")
        for name in each.foreign:
            print_line(f"{name} is nothing that mathinterp wrote; it is left alone.")


def told(fault: "Fault", store: str, address: Callable[[str], str]) -> str:
    """A file that is not as it should be, and what to type."""
    return f"{fault.kind}: {fault.file} ({fault.why}). {mend(fault, store, address)}"


@contextmanager
def mends_told(store: str, address: Callable[[str], str]) -> Iterator[None]:
    """Within the block a damaged file ends the command with what to type."""
    from mathinterp.store.faults import Damaged

    try:
        yield
    except Damaged as error:
        raise UserError(told(error.fault, store, address)) from error


def mend(fault: "Fault", store: str, address: Callable[[str], str]) -> str:
    """What to type."""
    option = store_option(store)
    if fault.mend == "rerun":
        again = in_store(fault.command, store)
        again = _trained_anew(again) if again is not None and is_command(again, "tune") else again
        return f"Mend: {again or 'the command that made run ' + str(fault.run) + ', again'}"
    if fault.mend in ("delete", "compact"):
        return f"Mend: mathinterp runs {fault.mend} {fault.run}{option}"
    if fault.mend == "views":
        return f"Mend: mathinterp sql{option}"
    where = address(fault.file)
    if fault.mend == "allow":
        return f"Mend: give this user the right to read {where}"
    return f"Mend: rm -- {shlex.quote(where)}" if "://" not in where else f"Mend: delete {where}"


def _trained_anew(command: str) -> str:
    """A training into another folder: into the one in which it is already, nothing is trained."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if (i > 0 and words[i - 1] == "--out") or word.startswith("--out="):
            words[i] += "-again"
    return shlex.join(words)


def in_store(command: str | None, store: str) -> str | None:
    """A command of a run's record, whatever store it named, for the one that is open: it may have been copied."""
    if command is None:
        return None
    kept: list[str] = []
    words = iter(shlex.split(command))
    for word in words:
        if word == "--store":
            next(words, None)
        elif not word.startswith("--store="):
            kept.append(word)
    end = kept.index("--") if "--" in kept else len(kept)
    return shlex.join(kept[:end]) + store_option(store) + "".join(f" {shlex.quote(word)}" for word in kept[end:])


def to_go(run: "Checked", store: str) -> str:
    """Of a run that is not finished."""
    missing = f"{len(run.missing)} of {counted(run.shards, 'shard')} not computed"
    return f"{run.run_id}: {missing}; how to go on: mathinterp runs show {run.run_id}{store_option(store)}"


def written_bytes(count: int) -> str:
    """Bytes in the largest unit (of 1,000) that leaves a number over 1."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def ago(seconds: float) -> str:
    """A time span in its largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def first_line(text: str | None) -> str | None:
    """Of an error with its traceback, the error."""
    return None if text is None else "".join(text.splitlines()[:1])
