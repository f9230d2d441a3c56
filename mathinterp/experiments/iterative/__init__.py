"""Iterative masking: mask the head that costs most, rank all others again with it masked, and so on (method.md sec. 3).

A ranking that sees redundancy: a head whose work a second one takes over costs little by itself. Step s scores every
head left with the s heads of the steps before masked too. One row per (step, head): the choice needs its average there
and then. A step needs those before it, so one replica does them in order; given the heads of finished steps it goes on
from there, else it finds them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.ablation import ABLATIONS, Ablation
from mathinterp.experiments.base import Context, Shard, Subject
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.finished_run import HeadRanking
from mathinterp.experiments.iterative.tables import TABLES
from mathinterp.experiments.options import normalized, option, read_layers
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.experiments.iterative.rows import IterativeState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

RANK_BY = ("accuracy", "logprob")


@dataclass(frozen=True)
class Iterative(Ablation):
    """Find a ranking of heads: mask the worst head, rank the others again, and so on.

    A step costs about as much as a head scan of the same prompts; one replica does all, one after another. Ties of
    accuracy go to the lowest log-probability, then to the lower layer and head; both are unweighted means over
    operations.
    """

    ablation: str = option(
        "mean",
        "mean over the counterfactual prompts; zero; or resample from the paired counterfactual.",
        choices=ABLATIONS,
    )
    steps: int = option(8, "Heads masked one after another.", least=1)
    rank_by: str = option(
        "accuracy",
        "Mask the head that leaves the lowest accuracy, or the lowest log-probability of the answer.",
        choices=RANK_BY,
    )
    layers: tuple[int, ...] | None = option(
        None, "Only heads of these layers, for example 0-3,17.", parse=read_layers, shown="all"
    )
    known: tuple[Head, ...] = field(default=(), compare=False)  # masked by the steps in the store; changes no row

    name: ClassVar[str] = "iterative"
    tables: ClassVar[Mapping[str, Table]] = TABLES
    one_replica: ClassVar[bool] = True
    command_examples: ClassVar[Sequence[str]] = (
        "scan iterative --limit 160",
        "scan iterative --steps 16 --ablation zero --rank-by logprob",
    )
    head_ranking: ClassVar[HeadRanking] = HeadRanking(
        ranked="SELECT layer, head FROM iterative_scan WHERE run_id = $run AND masked ORDER BY step",
        key="SELECT layer, head FROM iterative_scan WHERE run_id = $run AND masked",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, layers=read_layers(self.layers))

    def bind(self, context: Context) -> Self:
        """With the heads of the first steps that the store has, if this run was stopped before."""
        stopped = context.store.rows(
            "SELECT run_id FROM runs WHERE scan = $scan AND status <> 'finished'", {"scan": self.name}
        )
        if not stopped:
            return self
        masked = context.store.rows(
            "SELECT step, layer, head FROM iterative_scan WHERE run_id = $run AND masked ORDER BY step",
            {"run": context.run_id(self)},
        )
        known = (Head(row["layer"], row["head"]) for step, row in enumerate(masked) if row["step"] == step)
        return replace(self, known=tuple(known))

    def candidates(self, shape: ModelShape) -> list[Head]:
        """The heads that can be masked; raises UserError for a layer that does not exist."""
        for layer in self.layers or ():
            shape.check_layer(layer)
        return chosen_heads(shape, None, self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        layers = None if self.layers is None else sorted(set(self.layers))
        return {**super().parameters(), "steps": self.steps, "rank_by": self.rank_by, "layers": layers}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One file per step; the most expensive first is the first step first."""
        heads = len(self.candidates(shape))
        if self.steps > heads:
            raise UserError(f"cannot mask {self.steps} heads one after another: there are {heads}")
        return [Shard("iterative_scan", step, {"step": step}, cost=float(heads - step)) for step in range(self.steps)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (head left, prompt); the cost of a step is its number of heads."""
        return int(shard.cost) * len(prompts)

    @property
    def only_end(self) -> bool:
        """Whether nothing but END's row changes and counts."""
        return self.edited_positions == "end" and self.parameters()["scoring"] == "first_token"

    def prepare(self, subject: Subject) -> IterativeState:
        """Clean pass (and counterfactual pass) over all prompts."""
        from mathinterp.experiments.iterative.rows import prepare_steps

        return prepare_steps(self, subject)

    def notes(self, state: IterativeState) -> dict[str, Any]:
        """Engine, packing and noise floor of the run; how far passes without a head out stray from the baseline."""
        from mathinterp.experiments.iterative.rows import notes

        return notes(self, state)

    def run(self, state: IterativeState, shard: Shard) -> pa.Table:
        """Rows of one step; steps before it that are not known are done first."""
        from mathinterp.experiments.iterative.rows import step_rows

        return step_rows(self, state, shard.work["step"])
