"""What a finished run means: its rows through SQL, and the words, tables and figure made of them.

Knows a store's queries; knows nothing about how rows were computed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mathinterp.text import quoted

if TYPE_CHECKING:
    import pandas as pd

    from mathinterp.models.catalog import LoadedModel
    from mathinterp.store import Store

Row = dict[str, Any]
SIGNIFICANT = 0.05  # Benjamini-Hochberg q
ACCURACIES = dict.fromkeys(
    ("accuracy", "low", "high", "accuracy_add", "accuracy_sub", "accuracy_mul", "accuracy_div"), ""
)  # columns of paper A's tables, under a title that says per cent


@dataclass(frozen=True)
class Results:
    """One run of a store, to ask about; in its queries ``$run`` is the run's id.

    load_model: loads the run's model, for what its weights alone tell; None where only the store is at hand.
    """

    store: "Store"
    run_id: str
    load_model: "Callable[[], LoadedModel] | None" = None

    @property
    def run(self) -> Row | None:
        """The run's row of the view ``runs``: what it was and how far it is; None: there is no such run.

        One query for all that a page asks of a run, as it is not asked twice within ``Store.held``.
        """
        rows = self.rows(
            """SELECT scan, model, prompts, status, shards, shards_done, parameters::VARCHAR AS parameters,
                      notes::VARCHAR AS notes FROM runs WHERE run_id = $run"""
        )
        return {**rows[0], **{name: _object(rows[0][name]) for name in ("parameters", "notes")}} if rows else None

    @property
    def finished(self) -> bool:
        """Whether every shard is there; else a mean or ranking would be of what is there by chance."""
        return self.run is not None and self.run["status"] == "finished"

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """The result of a query as plain JSON; ``$run`` and ``$name`` take their values from here."""
        return self.store.rows(sql, {"run": self.run_id, **values})

    def frame(self, sql: str, **values: Any) -> "pd.DataFrame":
        """The result of a query as a pandas data frame; values as in ``rows``."""
        return self.store.dataframe(sql, {"run": self.run_id, **values})

    def query(self, sql: str) -> str:
        """``sql`` with this run's id written out, for people to copy."""
        return " ".join(sql.split()).replace("$run", quoted(self.run_id))


def _object(text: str | None) -> dict[str, Any]:
    """A JSON object; empty for whatever is none, as records may hold anything."""
    found = json.loads(text or "null")
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Shown:
    """A table for people.

    rows: as in the JSON and the views; accuracies, drops, effects and shares are fractions of 1.
    units: of columns of fractions that are printed times 100: "%" or "points", which the header then names, or "" where
        the title does.
    """

    title: str
    rows: Sequence[Row]
    units: Mapping[str, str] = field(default_factory=dict)

    @property
    def printed(self) -> list[Row]:
        """The rows with fractions in their units."""
        return [dict(_in_unit(name, value, self.units) for name, value in row.items()) for row in self.rows]

    def __str__(self) -> str:
        import pandas as pd

        table = pd.DataFrame(self.printed).to_string(index=False, float_format="{:.4g}".format, na_rep="")
        return f"{self.title}\n{table}"


def _in_unit(name: str, value: Any, units: Mapping[str, str]) -> tuple[str, Any]:
    if name not in units:
        return name, value
    header = f"{name} ({units[name]})" if units[name] else name
    return header, None if value is None else 100 * value


def per_operation(rows: Sequence[Row]) -> list[Row]:
    """``rows`` without those of the single operation that has the same figures as 'all', if there is but one."""
    operations = {row["operation"] for row in rows}
    return [row for row in rows if len(operations) != 2 or "all" not in operations or row["operation"] == "all"]


@dataclass(frozen=True, repr=False)
class Summary:
    """What a run says.

    parts: tables and sentences, in the order in which people read them.
    data: the same as plain JSON, under names that scripts rely on.
    queries: SQL to go on with.
    warnings: what makes the figures doubtful, a line each.
    """

    parts: Sequence[Shown | str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    queries: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def __str__(self) -> str:
        """For people: the parts, then what makes them doubtful."""
        return "\n\n".join([*(str(part) for part in self.parts if part), *self.warnings])

    __repr__ = __str__
