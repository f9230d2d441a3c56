"""What is found of a ranking's stability: frames, sentences and a summary. Knows nothing about how it was computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.experiments.reach import ROUGH
from mathinterp.experiments.results import Row, Shown, Summary
from mathinterp.experiments.stability.tables import FIRST

if TYPE_CHECKING:
    import pandas as pd

    from mathinterp.frame import Frame

BAR = 0.8  # of the mean Jaccard index (arXiv 2510.00845)
SURE = 0.95  # of the draws
FEW_TEMPLATES = 5  # of an operation, under which drawing them again means little


@dataclass(frozen=True, repr=False)
class Stability:
    """How stable a run's ranking is, for all its operations.

    nodes, overlap: as in the views stability and stability_overlap, a number within its layer being ``unit``.
    """

    run_id: str
    scan: str
    draws: int
    seed: int
    nodes: "Frame"
    overlap: "Frame"

    def lines(self, operation: str = "all") -> list[str]:
        """A sentence for each kind of node of which there are more than five."""
        nodes, overlap = (frame[frame["operation"] == operation] for frame in (self.nodes, self.overlap))
        kinds = dict.fromkeys(overlap["node"].tolist())
        return [_line(kind, nodes[nodes["node"] == kind], overlap[overlap["node"] == kind]) for kind in kinds]

    @property
    def warnings(self) -> list[str]:
        """What makes the figures doubtful."""
        found = []
        prompts = self.overlap[self.overlap["over"] == "prompts"]
        if len(prompts) and (fewest := int(prompts["units"].min())) < ROUGH:
            found.append(f"with {fewest} prompts of an operation the draws say little: give at least {ROUGH}")
        if "templates" not in self.overlap["over"].tolist() and len(self.overlap):
            found.append("templates are not drawn: some operation has only one, or its prompts name none")
        unknown = self.nodes[(self.nodes["rank"] <= max(FIRST)) & (self.nodes["known"] < 1)]
        if len(unknown):
            found.append(
                f"of some of the first {max(FIRST)} nodes not every prompt's value is stored (`known`, down to"
                f" {unknown['known'].min():.2f}): for each that is not, the mean of these stands, so those nodes vary"
                " more than shown"
            )
        return found

    def summary(self, operation: str = "all", top: int = 10) -> Summary:
        """How alike the first nodes are, and the ``top`` first; raises UserError for an operation that is not there."""
        known = list(dict.fromkeys(self.nodes["operation"].tolist()))
        if operation not in known:
            raise UserError(f"`operation` '{operation}' is not in run {self.run_id}; take one of {', '.join(known)}")
        nodes, overlap = (_rows(frame[frame["operation"] == operation]) for frame in (self.nodes, self.overlap))
        overlap = [{**row, "bar": BAR, "above_bar": row["pairwise"] >= BAR} for row in overlap]
        drawn = f"{self.draws} draws, seed {self.seed}, operation {operation}"
        own = f"WHERE run_id = '{self.run_id}' AND operation = '{operation}'"
        return Summary(
            parts=[
                Shown(f"How alike the first k are ({drawn})", [_without(row, "operation") for row in overlap]),
                Shown(
                    "Ranks that hold 95 % of the draws, and shares of draws among the first k",
                    [_named(row) for row in nodes if row["rank"] <= top],
                ),
                *self.lines(operation),
            ],
            data={
                "run_id": self.run_id, "scan": self.scan, "draws": self.draws, "seed": self.seed,
                "lines": self.lines(operation), "overlap": overlap, "nodes": nodes, "warnings": self.warnings,
            },
            queries=[
                f"SELECT * FROM stability {own} AND rank <= {top} ORDER BY over, node, rank",
                f"SELECT * FROM stability_overlap {own} ORDER BY over, node, k",
            ],
            warnings=self.warnings,
        )  # fmt: skip


def _line(kind: str, nodes: "pd.DataFrame", overlap: "pd.DataFrame") -> str:
    """How many of the first ten nodes (five, where there are not more than ten) are among them in nearly all draws."""
    k = 10 if 10 in overlap["k"].tolist() else min(FIRST)
    said: list[str] = []
    for row in overlap[overlap["k"] == k].to_dict("records"):
        first = nodes[(nodes["over"] == row["over"]) & (nodes["rank"] <= k)]
        sure = int((first[f"in_first_{k}"] >= SURE).sum())
        drawn = f"{sure} of {row['over']}" if said else f"{sure} are in at least {SURE:.0%} of draws of {row['over']}"
        few = row["over"] == "templates" and row["units"] < FEW_TEMPLATES
        about = f"; {row['units']} per operation are too few to mean much" if few else ""
        said.append(f"{drawn} (any two draws: Jaccard {row['pairwise']:.2f}{about})".replace("%", " %"))
    return f"The first {k} {kind}s: {', '.join(said)}. In a stable list any two have {BAR} or more."


def _rows(frame: "pd.DataFrame") -> list[Row]:
    from mathinterp.frame import Frame
    from mathinterp.store.query import json_rows

    return json_rows(Frame(frame).arrow())


def _named(row: Row) -> Row:
    """A node's row for people."""
    name = f"{row['node']} {row['layer']}" + ("" if row["unit"] is None else f".{row['unit']}")
    known = () if row["known"] < 1 else ("known",)
    return {"over": row["over"], "node": name} | _without(row, "over", "operation", "node", "layer", "unit", *known)


def _without(row: Mapping[str, Any], *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}
