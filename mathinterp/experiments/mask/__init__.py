"""Learned mask: which few heads and MLPs must stay as they are for the logit difference to stay.

The metric is that of attribution; the loss is in engine/attribution/mask.py. One training for all nodes and prompts: a
node has one score, which has no sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.experiments.attribution import check_contrasts
from mathinterp.experiments.base import Experiment, NothingToShow, Shard, Subject
from mathinterp.experiments.mask.tables import TABLES
from mathinterp.experiments.options import check_options, option
from mathinterp.experiments.results import Results, Summary
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.experiments.costs import Cost
    from mathinterp.experiments.mask.rows import MaskState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Mask(Experiment):
    """Train a mask over heads and MLPs that keeps the logit difference while most take their counterfactual output.

    Hard-concrete masks (arXiv 1712.01312), trained as in subnetwork probing (2104.03514).
    """

    steps: int = option(200, "Steps of training.", least=1, most=1_000_000)
    learning_rate: float = option(0.1, "Of Adam.", least=1e-6, most=100)
    budget: float = option(0.2, "Share of nodes that may be open at the end without a penalty (L0).", least=0, most=1)
    penalty: float = option(10.0, "Weight of the share that is open beyond the budget.", least=0)
    batch: int = option(32, "Pairs in a step.", least=1, most=100_000)
    mask_seed: int = option(0, "Of the draws.", least=0, most=2**31)

    name: ClassVar[str] = "mask"
    tables: ClassVar[Mapping[str, Table]] = TABLES
    prompt_set: ClassVar[str] = "operand_pairs"
    one_replica: ClassVar[bool] = True
    command_examples: ClassVar[Sequence[str]] = ("scan mask --limit 160 --budget 0.1",)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def needs_counterfactuals(self) -> bool:
        """Closed nodes take their output on X_c."""
        return True

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        names = ("steps", "learning_rate", "budget", "penalty", "batch", "mask_seed")
        return {name: getattr(self, name) for name in names}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The scores and the course of the training: of one training, which runs again where one of them is missing."""
        check_contrasts(prompts)
        return [Shard("mask_scores", 0, cost=float(self.steps)), Shard("mask_training", 0, cost=1.0)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """The pairs of all steps."""
        return self.steps * min(self.batch, len(prompts)) if shard.table == "mask_scores" else 0

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """Two forward passes and a backward one per step; see attribution/cost.py."""
        from mathinterp.experiments.attribution.cost import passes_cost

        pairs = min(self.batch, len(prompts))
        rows = {"mask_scores/00000": shape.n_layers * (shape.n_heads + 1), "mask_training/00000": self.steps}
        return passes_cost(shape, prompts, 2 + 3 * self.steps * pairs / len(prompts), rows, sites=0)

    def prepare(self, subject: Subject) -> MaskState:
        """Nothing: the first shard trains."""
        from mathinterp.experiments.mask.rows import MaskState

        return MaskState(self, subject)

    def run(self, state: MaskState, shard: Shard) -> pa.Table:
        """The scores, or the course of the training."""
        from mathinterp.experiments.mask.rows import score_rows, training_rows

        return (score_rows if shard.table == "mask_scores" else training_rows)(state)

    def notes(self, state: MaskState) -> dict[str, Any]:
        """Passes over each prompt, about."""
        shown = self.steps * min(self.batch, len(state.subject.prompts)) / len(state.subject.prompts)
        return {"forwards_per_prompt": round(2 + 2 * shown), "backwards_per_prompt": round(shown)}

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """See summary.py."""
        from mathinterp.experiments.mask.summary import summarize

        return summarize(results)
