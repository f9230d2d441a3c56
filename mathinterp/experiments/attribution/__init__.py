"""Attribution: the effect of patching each head and MLP, estimated for all of them from a few backward passes.

What is estimated is D, the change of m = logit(answer) - logit(distractor) at END when a node's output is that of the
counterfactual sentence at every token; ``scan heads`` and ``scan mlps`` measure it exactly (``ablation`` resample,
``positions`` all). Formulas and sources: engine/attribution/methods.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.attribution.tables import METHODS, TABLES
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.options import check_options, option
from mathinterp.experiments.results import Results, Summary
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.experiments.costs import Cost
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

POSITIONS = ("all", "end")
PROMPTS_PER_FILE, ROWS_PER_FILE = 64, 2_000_000


def check_contrasts(prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise UserError for a prompt without a distractor that differs from the answer in its first scored token."""
    for item in prompts:
        name = item.prompt.prompt_id
        if item.distractor is None:
            raise UserError(
                f"prompt '{name}' has no distractor, and what is measured is the answer's logit minus the distractor's;"
                " take the prompt set operand_pairs, or write the field distractor"
            )
        if item.distractor.position != -1:
            raise UserError(
                f"prompt '{name}': the distractor {item.prompt.distractor!r} begins with the answer's first token, and"
                " the logit difference is taken there; give a distractor that begins otherwise"
            )


@dataclass(frozen=True)
class ShownNodes:
    """How much of an attribution run is shown."""

    top: int = option(10, "Nodes shown per operation.", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Attribution(Experiment):
    """Estimate what patching each head and MLP does to the logit difference, from a few backward passes.

    Methods: atp (gradient times change, arXiv 2310.10348), eap-ig-inputs and eap-ig-activations (gradients averaged
    between the two sentences, 2403.17806), relp (relevance in place of gradients, 2508.21258), atp-star (layers dropped
    in turn on the way back, 2403.00745).
    """

    method: str = option("atp", "How effects are estimated.", choices=METHODS)
    steps: int = option(5, "Points between the two sentences, of the eap-ig methods.", least=1, most=10_000)
    neurons: bool = option(False, "Estimate every MLP neuron, too.")
    positions: str = option("all", "Tokens at which a node is patched: all or end.", choices=POSITIONS)

    name: ClassVar[str] = "attribution"
    tables: ClassVar[Mapping[str, Table]] = TABLES
    prompt_set: ClassVar[str] = "operand_pairs"
    show_options: ClassVar[type] = ShownNodes
    command_examples: ClassVar[Sequence[str]] = (
        "scan attribution --limit 160",
        "scan attribution --method eap-ig-inputs --steps 20 --neurons --limit 32",
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def needs_counterfactuals(self) -> bool:
        """Every node takes its output on X_c."""
        return True

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "method": self.method,
            "steps": self.steps if self.method.startswith("eap-ig") else None,
            "neurons": self.neurons,
            "positions": self.positions,
        }

    def check(self, shape: ModelShape) -> None:
        """Raise UserError for a model that the method, or what it is asked for, does not fit."""
        if self.neurons:
            shape.check_neurons()
        if self.method == "relp":
            from mathinterp.engine.attribution.rules import check_rules

            check_rules(shape)
        if self.method == "atp-star" and shape.n_layers < 2:
            raise UserError("`method` atp-star drops each of the other layers in turn: it needs a model of 2 and more")

    def nodes(self, shape: ModelShape) -> int:
        """Heads, MLPs and, where asked for, neurons."""
        return shape.n_layers * (shape.n_heads + 1 + (shape.n_neurons if self.neurons else 0))

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Files of 64 prompts, of fewer with very many nodes."""
        self.check(shape)
        check_contrasts(prompts)
        step = max(1, min(PROMPTS_PER_FILE, ROWS_PER_FILE // self.nodes(shape)))
        spans = [(start, min(start + step, len(prompts))) for start in range(0, len(prompts), step)]
        return [
            Shard("node_attributions", index, {"prompts": list(span)}, cost=float(span[1] - span[0]))
            for index, span in enumerate(spans)
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each prompt: all nodes at once."""
        start, stop = shard.work["prompts"]
        return int(stop - start)

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """See cost.py."""
        from mathinterp.experiments.attribution.cost import cost_of

        return cost_of(self, shape, prompts, shards)

    def prepare(self, subject: Subject) -> Subject:
        """Nothing: every shard makes its own passes."""
        return subject

    def run(self, state: Subject, shard: Shard) -> pa.Table:
        """All nodes on the shard's prompts."""
        from mathinterp.experiments.attribution.rows import rows_of

        start, stop = shard.work["prompts"]
        return rows_of(self, state, state.prompts[start:stop])

    def notes(self, state: Subject) -> dict[str, Any]:
        """Passes over each pair."""
        from mathinterp.engine.attribution.methods import passes_of

        forwards, backwards = passes_of(self.method, state.anatomy.shape.n_layers, self.steps)
        return {"forwards_per_prompt": forwards, "backwards_per_prompt": backwards}

    @classmethod
    def summarize(cls, results: Results, shown: ShownNodes) -> Summary:
        """See summary.py."""
        from mathinterp.experiments.attribution.summary import summarize

        return summarize(results, shown.top)
