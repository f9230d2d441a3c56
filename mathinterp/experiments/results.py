"""What a finished run means: its rows through SQL, and the words, tables and figure made of them.

Knows a store's queries; knows nothing about how rows were computed.
"""

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


@dataclass(frozen=True)
class Results:
    """One run of a store, to ask about; in its queries ``$run`` is the run's id.

    load_model: loads the run's model, for what its weights alone tell; None where only the store is at hand.
    """

    store: "Store"
    run_id: str
    load_model: "Callable[[], LoadedModel] | None" = None

    @property
    def finished(self) -> bool:
        """Whether every shard is there; else a mean or ranking would be of what is there by chance."""
        return self.rows("SELECT status FROM runs WHERE run_id = $run") == [{"status": "finished"}]

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """The result of a query as plain JSON; ``$run`` and ``$name`` take their values from here."""
        return self.store.rows(sql, {"run": self.run_id, **values})

    def frame(self, sql: str, **values: Any) -> "pd.DataFrame":
        """The result of a query as a pandas data frame; values as in ``rows``."""
        return self.store.dataframe(sql, {"run": self.run_id, **values})

    def query(self, sql: str) -> str:
        """``sql`` with this run's id written out, for people to copy."""
        return " ".join(sql.split()).replace("$run", quoted(self.run_id))


@dataclass(frozen=True)
class Shown:
    """A table for people."""

    title: str
    rows: Sequence[Row]

    def __str__(self) -> str:
        import pandas as pd

        table = pd.DataFrame(list(self.rows)).to_string(index=False, float_format="{:.4g}".format, na_rep="")
        return f"{self.title}\n{table}"


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
