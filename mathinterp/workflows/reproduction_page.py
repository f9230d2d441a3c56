"""A reproduction as Markdown and as JSON: every table and figure, the papers' numbers and what models gave.

Knows results of ``reproduce``; how commands are written is told by whoever prints them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from mathinterp.errors import UserError
from mathinterp.gates import shortened
from mathinterp.text import escaped, one_line
from mathinterp.workflows.papers import ITEMS
from mathinterp.workflows.papers.item import PAPERS, Cell, Item
from mathinterp.workflows.reproduce import ItemResult, Reproduction
from mathinterp.workflows.verdicts import COMPARED, Compared, Measured, Verdict

LEGEND = """Ours are followed by their 95 % interval, where they have one. **In the interval**: the printed number, as
far as it was rounded, lies in ours; the paper's own sampling error is not counted, so that with as many prompts as
the paper's a true value misses it oftener than one time in twenty. **Outside**: it does not. **Not comparable**: the
reason says why. On another model than the paper's nothing compares; the first head (neuron) of ours then stands
beside the first of theirs, to look at. Numbers are per cent unless the item says otherwise."""
SECOND_HAND = """**Second hand**: paper B's text was not at hand. Its numbers, and what is said of it, come from notes
that each item names, as do the numbers of a-figure1, which paper A's code prints. Look them up before you rely on a
verdict."""
ABOUT = ("model", "fingerprint", "dtype", "own", "store", "limit", "runs", "missing")  # JSON as they are
LONGEST = 900  # characters of a reason


def markdown(found: Sequence[Reproduction], command: Callable[[str], str]) -> str:
    """The page. command: an item's id -> the command that makes it; "" -> that of all."""
    items = [item for item in ITEMS if any(each.item.id == item.id for of in found for each in of.items)]
    lines = [
        "# Reproduction", "",
        f"Written by `{command('')}`; nothing here was typed. Every table and figure of paper A ({PAPERS['A']}) and"
        f" paper B ({PAPERS['B']}), what makes it, the paper's numbers and what the models at"
        " hand gave.", "", LEGEND, "", *([SECOND_HAND, ""] if any(item.source.second_hand for item in items) else []),
        "## Models", "", *_table(("model", "dtype", "taken for", "prompts of each set"), [_about(each)
        for each in found]),
        "", "## In short", "",
        *_table(
            ("item", "paper", "what", *(escaped(each.model) for each in found)),
            [(f"[{item.id}](#{item.id})", f"{item.paper}, {item.place}", item.measures,
              *(_reasons(result.verdict) if (result := _of(each, item)) else "" for each in found)) for item in items],
        ), "", "## Items",
    ]  # fmt: skip
    for item in items:
        lines += ["", *_section(item, found, command)]
    lines += ["", "## Runs", ""]
    for each in found:
        lines += [f"### Runs of {escaped(each.model)}", "", *_runs(each), ""]
    return "\n".join(lines).rstrip() + "\n"


def _about(found: Reproduction) -> tuple[str, ...]:
    most = "all" if found.limit is None else f"at most {found.limit}"
    return (escaped(found.model), escaped(found.dtype), found.own or "none of the papers' models", most)


def _of(found: Reproduction, item: Item) -> ItemResult | None:
    return next((each for each in found.items if each.item.id == item.id), None)


def _section(item: Item, found: Sequence[Reproduction], command: Callable[[str], str]) -> list[str]:
    note = f" {item.note[0].upper()}{item.note[1:]}." if item.note else ""
    unit = "" if item.shown == "%" or not item.sql else " Not per cent."
    printed, source = f"paper ({item.model})", f" Numbers from {item.source.name}." if item.cells else ""
    if item.source.second_hand and item.cells:
        printed, source = f"paper ({item.model}), second hand", f" **Second hand**: numbers from {item.source.name}."
    results = [_of(each, item) for each in found]
    lines = [
        f"### {item.id}", "",
        f"Paper {item.paper}, {item.place}; {item.model}: {item.measures}.{unit}{note}{source}", "",
        f"`{command(item.id)}`", "",
    ]  # fmt: skip
    rows = _rows(item, results)
    if rows:
        lines += [*_table(("", printed, *(escaped(each.model) for each in found)), rows), ""]
    return [
        *lines,
        *(
            f"- {escaped(each.model)}: {_reasons(result.verdict)}"
            for each, result in zip(found, results, strict=True)
            if result
        ),
    ]


def _rows(item: Item, results: Sequence[ItemResult | None]) -> list[tuple[str, ...]]:
    """A row for each printed number, then one for each of our further ones."""
    per_model = [list(result.lines) if result else [] for result in results]
    printed = [[line for line in lines if line.paper is not None] for lines in per_model]
    more = [[line for line in lines if line.paper is None] for lines in per_model]
    rows = [
        (_label(cell), _paper(cell), *(_ours(lines[place]) if place < len(lines) else "" for lines in printed))
        for place, cell in enumerate(item.cells)
    ]
    whats = dict.fromkeys(line.what for lines in more for line in lines)
    for what in whats:
        of_it = [[line for line in lines if line.what == what] for lines in more]
        rows += [(escaped(what), "", *map(_ours, together)) for together in zip_longest(*of_it)]
    return [row for row in rows if any(row[1:])]


def _label(cell: Cell) -> str:
    return (
        f"{cell.what}, {cell.unit}"
        if cell.unit and not cell.rank
        else f"{cell.what}, no. {cell.rank}"
        if cell.rank
        else cell.what
    )


def _paper(cell: Cell) -> str:
    return f"{cell.unit}: {cell.text}" if cell.rank else cell.text


def _ours(line: Compared | None) -> str:
    """Our number with head and interval; with a verdict where there is one."""
    if line is None or line.ours is None or line.ours.value is None:
        return ""
    ours = line.ours
    unit = f"{escaped(ours.unit)}: " if ours.unit not in ("", "original") else ""
    drawn = ours.low is not None and ours.high is not None and (ours.low, ours.high) != (ours.value, ours.value)
    interval = f" ({number(ours.low)} to {number(ours.high)})" if drawn else ""
    verdict = f", **{line.verdict}**" if line.verdict in COMPARED else ""
    return f"{unit}{number(ours.value)}{interval}{verdict}"


def number(value: float | None) -> str:
    """Three digits, or as many as stand before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _runs(found: Reproduction) -> list[str]:
    rows = [
        (*(escaped(row[name]) for name in ("stage", "run_id")), _asked(row["prompts"], row["n_prompts"]),
         f"{row['wall_seconds']:.0f} s")
        for row in found.ran
    ]  # fmt: skip
    lost = [(escaped(stage), "left out", _reasons(why), "") for stage, why in found.missing.items()]
    return _table(("stage", "run", "prompts", "time"), [*rows, *lost])


def _asked(prompts: str, count: int) -> str:
    """A set with its number of prompts (a training has none); of a file the name alone, wherever it lies."""
    name = escaped(re.sub(r"\S*/", "", prompts))
    return f"{name} ({count:,})" if count else name


def _reasons(text: str) -> str:
    """On one line, without markup; fields stay in backticks."""
    return re.sub(r"\\([`_])", r"\1", escaped(text, LONGEST))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return [first, f"|{'---|' * len(head)}", *others]


def as_json(found: Reproduction) -> dict[str, Any]:
    """Plain JSON, from which ``from_json`` makes it again."""
    about = {name: getattr(found, name) for name in ABOUT}
    return {**about, "ran": list(found.ran), "items": [_item_json(each) for each in found.items]}


def _item_json(result: ItemResult) -> dict[str, Any]:
    return {
        "id": result.item.id, "paper": result.item.paper, "place": result.item.place, "measures": result.item.measures,
        "paper_model": result.item.model, "source": result.item.source.name,
        "second_hand": result.item.source.second_hand, "verdict": result.verdict,
        "runs": result.runs, "missing": result.missing,
        "lines": [
            {
                "what": line.what, "ours": None if line.ours is None else vars(line.ours),
                "paper": None if line.paper is None else vars(line.paper), "verdict": line.verdict.value,
                "why": line.why,
            }
            for line in result.lines
        ],
    }  # fmt: skip


def from_json(saved: Mapping[str, Any], where: str) -> Reproduction:
    """A reproduction that was saved; raises UserError for anything else, or one of other items than today's."""
    known = {item.id: item for item in ITEMS}
    try:
        items = tuple(
            ItemResult(known[each["id"]], tuple(map(_line, each["lines"])), each["runs"], each["missing"])
            for each in saved["items"]
        )
        about = {name: saved[name] for name in ABOUT}
        found = Reproduction(**about, items=items, ran=tuple(saved["ran"]))
        markdown([found], str)  # reads all that the page needs
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        said = shortened(one_line(repr(error)), 200)
        raise UserError(f"{where} is no reproduction saved as JSON by this version ({said})") from error
    for result in found.items:
        if [line.paper for line in result.lines if line.paper is not None] != list(result.item.cells):
            raise UserError(
                f"{where}: {result.item.id} holds other numbers of the paper than this version; make it again"
            )
    return found


def _line(saved: Mapping[str, Any]) -> Compared:
    ours = None if saved["ours"] is None else Measured(**saved["ours"])
    paper = None if saved["paper"] is None else Cell(**saved["paper"])
    return Compared(saved["what"], ours, paper, Verdict(saved["verdict"]), saved["why"])
