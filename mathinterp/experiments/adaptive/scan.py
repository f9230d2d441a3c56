"""What an experiment adds to be adaptive: options, its nodes, and how they are cut into files."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.adaptive.drops import Node
from mathinterp.experiments.adaptive.order import order_of
from mathinterp.experiments.adaptive.reuse import Reused, find_reused
from mathinterp.experiments.base import Context, Experiment, Shard
from mathinterp.experiments.growing import Growing
from mathinterp.experiments.options import option
from mathinterp.gates import MOST_SEED, real

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

FDR = 0.05
RUN_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class Adaptive(Experiment):
    """A scan of nodes that can stop each node as soon as it is decided (docs/statistics.md)."""

    decide: float | None = option(
        None,
        "Decide of each node whether its mean drop is above so many points (paths: per cent), on prompts in random"
        " order, and stop when sure.",
        shown="every node on every prompt",
        metavar="POINTS",
    )
    fdr: float = option(FDR, "With `decide`: most of the decisions, on average, that may be wrong.")
    order_seed: int = option(0, "With `decide`: of the random order.", least=0, most=MOST_SEED)
    reuse: str | None = option(
        None,
        "Take over what this finished run with `decide` computed, of the same scan, model and prompts. Last bits may"
        " differ from those of a scan without it, so that it is another run.",
        metavar="RUN_ID",
    )
    reused: Reused | None = None  # what that is, found by ``bind``

    node_table: ClassVar[str]  # where the rows of nodes go
    has_baseline: ClassVar[bool] = True  # each block has rows of the unedited model, in baseline
    choosing: ClassVar[Shard | None] = None  # run first: its rows say which prompts nodes are decided about

    def __post_init__(self) -> None:
        if self.decide is None:
            if self.reuse is not None and not (isinstance(self.reuse, str) and RUN_ID.fullmatch(self.reuse)):
                raise UserError(f"`reuse` '{str(self.reuse)[:40]}' is no run id; view runs of the store has them")
            if self.fdr != FDR or self.order_seed != 0:
                raise UserError("`fdr` and `order_seed` are of decisions; give `decide` too, or leave them out")
            return
        if self.reuse is not None:
            raise UserError("`reuse` is of full scans, `decide` of those that stop early; give one of them")
        object.__setattr__(self, "decide", _between("decide", self.decide, 100, "points, for example 5"))
        object.__setattr__(self, "fdr", _between("fdr", self.fdr, 1, "a share, for example 0.05"))

    def decision_parameters(self) -> dict[str, Any]:
        """Part of the run's parameters where there is something to decide; a full scan keeps its own."""
        if self.reuse is not None:
            return {"reuse": self.reuse, "reused": None if self.reused is None else self.reused.cut}
        if self.decide is None:
            return {}
        return {"decide": self.decide, "fdr": self.fdr, "order_seed": self.order_seed}

    def whole(self) -> Self:
        """Every node on every prompt."""
        same = self.decide is None and self.reuse is None
        return self if same else replace(self, decide=None, fdr=FDR, order_seed=0, reuse=None, reused=None)

    def adaptive(self, parameters: Mapping[str, Any]) -> Self:
        """The same scan with the ``decision_parameters`` among these."""
        names = ("decide", "fdr", "order_seed")
        return replace(self, **{name: parameters[name] for name in names}, reuse=None, reused=None)

    @property
    def binds(self) -> bool:
        """Under ``reuse``."""
        return self.reuse is not None

    def bind(self, context: Context) -> Self:
        """Find what ``reuse`` names."""
        if self.reuse is None:
            return self
        return replace(self, reused=find_reused(self, context))

    @property
    def by_blocks(self) -> bool:
        """Whether nodes run on parts of the prompts, in random order."""
        return self.decide is not None or self.reused is not None

    def order(self, population: Sequence[TokenizedPrompt]) -> np.ndarray:
        """The random order, of a scan ``by_blocks``."""
        return order_of(
            population, self.weights(population), self.order_seed if self.reused is None else self.reused.order_seed
        )

    def taken_over(self, rows: pa.Table, shard: Shard) -> pa.Table:
        """Rows of the shard's nodes alone."""
        if shard.table != self.node_table:
            return rows
        heads = rows["head"].to_pylist() if "head" in rows.column_names else [None] * len(rows)
        wanted = set(self.nodes_in(shard))
        kept = [node in wanted for node in zip(rows["layer"].to_pylist(), heads, strict=True)]
        return rows.filter(pa.array(kept, pa.bool_()))

    def growing(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> Growing | None:
        """See growth.py."""
        if self.decide is None:
            return None
        from mathinterp.experiments.adaptive.growth import AdaptiveRun

        return AdaptiveRun(self, shape, prompts)

    def population(self, rows: pa.Table, prompts: Sequence[TokenizedPrompt]) -> list[TokenizedPrompt]:
        """The prompts that the rows of ``choosing`` choose."""
        raise AssertionError("nothing is chosen")

    @abstractmethod
    def weights(self, prompts: Sequence[TokenizedPrompt]) -> np.ndarray:
        """The prompts' weights (P) in the mean that is decided about."""

    @abstractmethod
    def decided_nodes(self, shape: ModelShape) -> list[Node]:
        """All nodes, layer by layer."""

    @abstractmethod
    def files(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Some nodes, cut into those of one file each."""

    @abstractmethod
    def named(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """A file's nodes as part of a shard's work."""

    @abstractmethod
    def nodes_in(self, shard: Shard) -> list[Node]:
        """The other way round."""

    @abstractmethod
    def drops(
        self, rows: pa.Table, baseline: pa.Table | None, nodes: Sequence[Node], prompt_ids: Sequence[str]
    ) -> np.ndarray:
        """What is decided about, N P, from stored rows; raises ValueError where they are of other nodes or prompts."""


def _between(name: str, given: Any, most: float, example: str) -> float:
    """A number above 0 and under ``most``."""
    try:
        number = real(given)
    except ValueError as error:
        raise UserError(f"`{name}` {error}; give {example}") from error
    if not 0 < number < most or not math.isfinite(number):
        raise UserError(f"`{name}` {number:g} is not between 0 and {most}; give {example}")
    return number
