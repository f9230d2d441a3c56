"""Comparative Neuron Analysis: importance and coefficient of every FFN neuron at END, original against intervened.

method.md section 5. Interventions: heads zeroed at every position; another model (the same one with an adapter, or any
of the same shape and vocabulary); or the counterfactual input. Per prompt the neurons that rank first are kept, by
layer, so that the first of all layers together can be told from the rows; over all prompts there are mean and spread of
every neuron, by operation. Heads, attention and the whole MLP get the same score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.engine.lens import TARGETS
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.neurons.against import MODELS, Against, Keep, OtherModel, other_model, require_room
from mathinterp.experiments.neurons.ranking import BY_MEAN
from mathinterp.experiments.neurons.tables import TABLES
from mathinterp.experiments.options import check_options, normalized, option, read_layers
from mathinterp.experiments.ranking import Ranking
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.experiments.neurons.rows import NeuronState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

RANKINGS = ("difference", "abs", "ratio")
PROMPTS_A_SHARD = 4096  # their logits are held together; each block multiplies unembedding and values again


@dataclass(frozen=True)
class NeuronsShown:
    """Options of the summary."""

    tokens: bool = option(False, "Also show what the first neurons write; loads the model here.")


@dataclass(frozen=True)
class Neurons(Experiment):
    """Importance and coefficient of every FFN neuron at END: original against intervened (paper A, section 4).

    change = original - intervened, or tuned - original with adapter: and model:.
    Whatever is kept of a prompt, mean and spread of every neuron are stored for each operation.
    """

    against: Against | None = option(
        None,
        "head:17.22[,14.19] zeroed; adapter:PATH; model:NAME; or input, the counterfactual.",
        parse=Against.read,
        shown="nothing",
        metavar="WHAT",
    )
    target: str = option("predicted", "The token explained: the original's, or the answer's first.", choices=TARGETS)
    rank: str = option(
        "difference", "A prompt's first neurons: by change, by its size, or by change / importance.", choices=RANKINGS
    )
    keep: Keep = option(
        Keep(), "Rows of a prompt: topk:K over all layers, or all.", parse=Keep.read, shown="topk:100", metavar="WHAT"
    )
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    other: OtherModel | None = None  # the model that ``against`` names, found by ``bind``

    name: ClassVar[str] = "neurons"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    show_options: ClassVar[type] = NeuronsShown
    node_ranking: ClassVar[Ranking] = BY_MEAN
    command_examples: ClassVar[Sequence[str]] = (
        "scan neurons --against head:0.6 --tokens",
        "scan neurons --model smollm2 --against adapter:smollm2-arithmetic --limit 8",
        "scan neurons --prompts pairs --against input --keep topk:500",
    )

    def __post_init__(self) -> None:
        if isinstance(self.against, str):
            normalized(self, against=Against.read(self.against))
        if isinstance(self.keep, str):
            normalized(self, keep=Keep.read(self.keep))
        normalized(self, layers=read_layers(self.layers))
        check_options(self)

    @property
    def needs_counterfactuals(self) -> bool:
        """The counterfactual input is the intervention."""
        return self.against is not None and self.against.kind == "input"

    @property
    def conditions(self) -> int:
        """Sides of the comparison: 1 where there is nothing to compare with."""
        return 1 if self.against is None else 2

    @property
    def tuned(self) -> bool:
        """Whether the intervened side is another model: then change = tuned - original, else original - intervened."""
        return self.against is not None and self.against.kind in MODELS

    @property
    def models_held(self) -> int:
        """Another model is held beside the original."""
        return 2 if self.tuned else 1

    def bind(self, context: Context) -> Self:
        """With the other model found; raises UserError for one that cannot be compared, or rows that find no room."""
        bound = self
        if self.against is not None and self.tuned:
            bound = replace(self, other=other_model(self.against, context.model))
        if self.keep.everything:
            neurons = len(self.chosen(context.model.shape)) * context.model.shape.n_neurons
            require_room(context.store, neurons, len(context.prompts), self.conditions)
        return bound

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers looked at; raises UserError for a layer or head that does not exist."""
        for head in self.against.heads if self.against else ():
            shape.check_head(*head)
        return shape.chosen_layers(self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row or how it is read; another model is its fingerprint."""
        against = None if self.against is None else str(self.against)
        if self.against is not None and self.tuned:
            assert self.other is not None, "the other model is found by bind"
            against = f"{self.against.kind}:{self.other.fingerprint}"
        return {
            "against": against,
            "change": "intervened - original" if self.tuned else "original - intervened",
            "target": self.target,
            "rank": self.rank,
            "top": self.keep.top,
            "keep": "all" if self.keep.everything else "top",
            "layers": None if self.layers is None else list(self.layers),
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One a layer and block of prompts, and the prompts' target tokens."""
        blocks = [(s, min(s + PROMPTS_A_SHARD, len(prompts))) for s in range(0, len(prompts), PROMPTS_A_SHARD)]
        work = [{"layers": [layer], "prompts": list(block)} for block in blocks for layer in self.chosen(shape)]
        pieces = [Shard("neuron_scan", index, part) for index, part in enumerate(work)]
        return [*pieces, Shard("neuron_targets", 0, cost=0.1)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (layer, prompt, condition); the clean passes behind them are few."""
        first, stop = shard.work.get("prompts", (0, 0))
        return len(shard.work.get("layers", [])) * int(stop - first) * self.conditions

    def prepare(self, subject: Subject) -> NeuronState:
        """The passes whose activations at END everything else is made of."""
        from mathinterp.experiments.neurons.rows import prepare

        return prepare(subject, self.target, self.against, self.other)

    def notes(self, state: NeuronState) -> dict[str, Any]:
        """What the original was compared with, for people."""
        return {"against": self.other.label if self.other is not None else self.parameters()["against"]}

    def run(self, state: NeuronState, shard: Shard) -> pa.Table:
        """Rows of one layer: the prompts' first neurons, heads and blocks, and every neuron's summaries over them."""
        from mathinterp.experiments.neurons.rows import layer_rows, target_rows

        if shard.table == "neuron_targets":
            return target_rows(state)
        top = None if self.keep.everything else self.keep.top
        return layer_rows(state.of_prompts(*shard.work["prompts"]), shard.work["layers"][0], self.rank, top)
