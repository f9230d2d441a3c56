"""Pruning by comparative neuron analysis: keep what a LoRA enhances, prune the rest of the deep layers (paper A, 6.1).

Steps: a LoRA on one layer; CNA original against tuned on all one-digit cases; the union of each case's first neurons
in the deep layers is kept and all others there are pruned (down_proj columns at zero); a new LoRA on the same layer,
trained on the pruned model. Control: as many random neurons kept in each layer, none of the union. Layers by share of
the depth (models/depth.py). Here are the sets of neurons and the scan that scores every condition; cli/prune.py puts
the steps together.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import torch

from mathinterp.engine.neuron_sets import NeuronMask, zeroed_neurons
from mathinterp.engine.scores import Answers, answers_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.neuron_controls import layer_matched_neurons
from mathinterp.experiments.scored import score_table, scores_of
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.tuning.attached import attached
from mathinterp.tuning.prune.tables import PRUNE_NEURONS, PRUNE_SCAN, TABLES

PAPER_TOP, PAPER_NEURONS = 500, 15 * 11008  # of the neurons in paper A's layers 17-31, a case's first


def default_top(shape: ModelShape, deep: Sequence[int]) -> int:
    """As large a share of the deep layers' neurons as paper A's 500 of 165,120; at least 1."""
    return max(1, round(PAPER_TOP * len(deep) * shape.n_neurons / PAPER_NEURONS))


def pruned_neurons(shape: ModelShape, deep: Sequence[int], kept: Sequence[Neuron]) -> list[Neuron]:
    """All neurons of the deep layers but those kept."""
    stay = set(kept)
    return [(layer, k) for layer in deep for k in range(shape.n_neurons) if (layer, k) not in stay]


def random_kept(shape: ModelShape, deep: Sequence[int], kept: Sequence[Neuron], seed: int) -> list[Neuron]:
    """As many neurons of each deep layer as are kept there, none of those that are kept.

    Raises UserError where nothing would be pruned, so that a control says nothing, or a layer has too few others.
    """
    if len(kept) >= len(deep) * shape.n_neurons:
        raise UserError(
            "every neuron of the deep layers is kept, nothing is pruned; give a smaller --top or other --cases"
        )
    for layer, count in Counter(layer for layer, _ in kept).items():
        if 2 * count > shape.n_neurons:
            raise UserError(
                f"layer {layer} keeps {count} of {shape.n_neurons} neurons, which leaves {shape.n_neurons - count} for"
                " a random control of as many; give a smaller --top, or --control-seeds 0 for none"
            )
    return sorted(layer_matched_neurons(shape, kept, seed), key=lambda neuron: deep.index(neuron[0]))


@dataclass(frozen=True)
class Condition:
    """A model to score: the original with neurons pruned, with an adapter, or both."""

    name: str  # lora, pruned, random, pruned_lora or random_lora
    seed: int = 0
    kept: tuple[Neuron, ...] | None = field(default=None, repr=False)  # None: nothing is pruned
    adapter: str | None = None  # folder
    trained_as: str | None = None  # the adapter's run id


@dataclass
class PruneState:
    """What a replica keeps between conditions; the model is as loaded before and after each."""

    subject: Subject
    answers: Answers


@dataclass(frozen=True)
class Prune(Experiment):
    """Score the same prompts under each condition; the baseline is the original model.

    deep: the layers that were pruned.
    """

    conditions: tuple[Condition, ...]
    deep: tuple[int, ...]

    name: ClassVar[str] = "prune"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; sets of neurons are fingerprints and counts."""
        told = [
            {
                "condition": each.name,
                "seed": each.seed,
                "kept": None if each.kept is None else [len(each.kept), _digest(each.kept)],
                "trained_as": each.trained_as,
            }
            for each in self.conditions
        ]
        return {"conditions": told, "pruned_layers": list(self.deep), "scoring": "token"}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One a condition, the baseline, and the neurons kept."""
        for layer in self.deep:
            shape.check_layer(layer)
        pieces = [Shard("prune_scan", index, {"condition": index}) for index in range(len(self.conditions))]
        return [*pieces, Shard("baseline", 0), Shard("prune_neurons", 0, cost=0.1)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each prompt."""
        return 0 if shard.table == "prune_neurons" else len(prompts)

    def prepare(self, subject: Subject) -> PruneState:
        """Nothing yet."""
        return PruneState(subject, answers_of(subject.prompts))

    def notes(self, state: PruneState) -> dict[str, Any]:
        """How many neurons the pruned layers have."""
        return {"pruned_from": len(self.deep) * state.subject.anatomy.shape.n_neurons}

    def run(self, state: PruneState, shard: Shard) -> pa.Table:
        """Rows of one condition."""
        anatomy, prompts = state.subject.anatomy, state.subject.prompts
        if shard.table == "prune_neurons":
            return self._neuron_rows()
        if shard.table == "baseline":
            return score_table(BASELINE, prompts, state.answers, scores_of(anatomy, prompts), {})
        condition = self.conditions[shard.work["condition"]]
        with zeroed_neurons(anatomy, self._mask(anatomy.shape, condition)):
            if condition.adapter is None:
                scores = scores_of(anatomy, prompts)
            else:
                with attached(anatomy, Path(condition.adapter)):
                    scores = scores_of(anatomy, prompts)
        same = {"condition": condition.name, "seed": condition.seed}
        return score_table(PRUNE_SCAN, prompts, state.answers, scores, same)

    def _mask(self, shape: ModelShape, condition: Condition) -> NeuronMask:
        if condition.kept is None:
            return {}
        mask = {layer: torch.ones(shape.n_neurons, dtype=torch.bool) for layer in self.deep}
        for layer, neuron in condition.kept:
            mask[layer][neuron] = False
        return mask

    def _neuron_rows(self) -> pa.Table:
        rows: list[Mapping[str, Any]] = [
            {"condition": each.name, "seed": each.seed, "layer": layer, "neuron": neuron}
            for each in self.conditions
            if each.kept is not None and each.adapter is None
            for layer, neuron in each.kept
        ]
        return pa.Table.from_pylist(rows, PRUNE_NEURONS)


def _digest(neurons: Sequence[Neuron]) -> str:
    return hashlib.sha256(json.dumps(sorted(neurons)).encode()).hexdigest()[:16]
