"""What an item of a paper is, and how its printed numbers are written down.

Knows numbers and names; knows nothing about how anything is computed.
"""

import re
from dataclasses import dataclass
from typing import Any

PAPERS = {"A": "arXiv 2409.14144", "B": "arXiv 2409.01659"}


@dataclass(frozen=True)
class Source:
    """Where a number was read."""

    name: str
    second_hand: bool = False  # not from the paper itself


PAPER_TEXT = Source("the paper")
PROJECT_NOTES = Source("notes made when this project began", second_hand=True)
READERS_NOTES = Source(
    "a reader's notes (github.com/Hypogenic-AI/isolating-knowledge-updates-5975-claude-opus-5-5,"
    " papers/notes/2409.01659.md)",
    second_hand=True,
)

# What a model's config has to say to be taken for a paper's. Weights are not compared: nobody publishes their digest.
PAPER_MODELS: dict[str, dict[str, Any]] = {
    "Llama-7B": {
        "model_type": "llama", "n_layers": 32, "n_heads": 32, "n_groups": 32, "d_model": 4096, "n_neurons": 11008,
        "max_position_embeddings": 2048,
    },
    "Llama-2-7B": {
        "model_type": "llama", "n_layers": 32, "n_heads": 32, "n_groups": 32, "d_model": 4096, "n_neurons": 11008,
        "max_position_embeddings": 4096,
    },
    "Llama-2-13B": {
        "model_type": "llama", "n_layers": 40, "n_heads": 40, "n_groups": 40, "d_model": 5120, "n_neurons": 13824,
        "max_position_embeddings": 4096,
    },
    "GPT-J-6B": {"model_type": "gptj", "n_layers": 28, "n_heads": 16, "d_model": 4096, "n_neurons": 16384},
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One printed number.

    what: which, in the words of the item's query; unit: the head or neuron it is of, "" where there is none;
    rank: its place among the units printed, from 1 (0: no unit); text: as printed.
    """

    what: str
    text: str
    unit: str = ""
    rank: int = 0

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text.replace(",", ""))

    @property
    def last_digit(self) -> float:
        """What one in the last printed digit is worth: 0.1 of 42.9."""
        return 10.0 ** -len(self.text.partition(".")[2])


@dataclass(frozen=True)
class Item:
    """A table, a figure, or a result that a paper gives in its text.

    id: as ``only`` takes it.
    place: table or figure and section.
    model: that the numbers are of, a key of PAPER_MODELS.
    sql: reads ours: columns what, unit, rank, value, low, high,
    n (others are left out); $stage is the run of that stage,
        $units the units that the paper prints. None: ``why`` says why nothing is measured.
    shown: "%": fractions, times 100; "": as they are.
    exact: one sentence or the weights alone: there is nothing to draw,
    and ours is to agree with the last printed digit.
    why: what makes the item not comparable on any model.
    own_model_only: run on ``model`` alone, as it repeats another item there.
    baseline: "loss" or "gain": measured against an accuracy that must leave something to lose or to gain.
    rows_why: what begins so compares on no model, and why.
    """

    id: str
    paper: str
    place: str
    measures: str
    model: str
    sql: str | None = None
    cells: tuple[Cell, ...] = ()
    source: Source = PAPER_TEXT
    shown: str = "%"
    exact: bool = False
    why: str = ""
    note: str = ""
    own_model_only: bool = False
    baseline: str = ""
    rows_why: tuple[tuple[str, str], ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """Names in the query that a run is to be put for: stages, and others."""
        return tuple(dict.fromkeys(re.findall(r"\$(\w+)", self.sql or "")))

    def scale(self, what: str) -> float:
        """By what our value is multiplied for print; numbers of neurons are counts."""
        return 100.0 if self.shown == "%" and not what.startswith("number ") else 1.0

    def reasons(self, what: str) -> tuple[str, ...]:
        """Why this number compares on no model."""
        return tuple(why for why in (self.why, *(why for start, why in self.rows_why if what.startswith(start))) if why)

    @property
    def units(self) -> tuple[str, ...]:
        """The units printed, each once."""
        return tuple(dict.fromkeys(cell.unit for cell in self.cells if cell.unit))


def units(printed: str, label: str = "") -> tuple[Cell, ...]:
    """A table whose columns are units: the first line names them (``ori`` has no rank), each further one a row.

    >>> [(cell.what, cell.unit, cell.rank, cell.text) for cell in units("ori 17.22\\nadd 96.8 42.9")]
    [('add', 'original', 0, '96.8'), ('add', '17.22', 1, '42.9')]
    """
    head, *rows = (line.split() for line in printed.strip().splitlines())
    names = ["original" if name == "ori" else name for name in head]
    start = 1 - names.count("original")
    return tuple(
        Cell(f"{label}{row[0]}", text, name, start + place)
        for row in rows
        for place, (name, text) in enumerate(zip(names, row[1:], strict=True))
    )


def grid(printed: str) -> tuple[Cell, ...]:
    """A table whose columns are no units: ``what`` is row and column. A dash is an empty cell.

    >>> [(cell.what, cell.text) for cell in grid("top99 top50\\nmask 100.0 96.0")]
    [('mask top99', '100.0'), ('mask top50', '96.0')]
    """
    head, *rows = (line.split() for line in printed.strip().splitlines())
    return tuple(
        Cell(f"{row[0]} {name}", text)
        for row in rows
        for name, text in zip(head, row[1:], strict=True)
        if text != "-"
    )  # fmt: skip


def values(**printed: str) -> tuple[Cell, ...]:
    """Single numbers by name; an underscore stands for a space."""
    return tuple(Cell(name.replace("_", " "), text) for name, text in printed.items())
