"""What zeroing a set of neurons does to answers and to ordinary text, against random neurons.

Conditions: "original"; "edited", the given neurons zeroed at every token; "random", as many others in each layer, once
for each of a few seeds. Per condition the scored tokens of all prompts, and the log-probability of every passage of a
text (its perplexity is a view). Zeroing a neuron equals zeroing its column of down_proj (method.md section 2).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.neuron_controls import layer_matched_neurons
from mathinterp.experiments.neuron_edit.tables import EDIT_NEURONS, TABLES, Condition
from mathinterp.experiments.options import check_options, normalized, option, read_neurons
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_DRAWS
from mathinterp.models.units import Neuron

if TYPE_CHECKING:
    from mathinterp.experiments.neuron_edit.rows import EditState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class NeuronEdit(Experiment):
    """Score prompts and text with ``neurons`` zeroed.

    neurons: most important first.
    passages: token ids of pieces of text, each of at least two tokens; may be empty.
    """

    neurons: tuple[Neuron, ...] = option((), "Neurons to zero, most important first: 28.3696,13.7.", parse=read_neurons)
    seeds: int = option(5, "Draws of as many random neurons in the same layers.", least=0, most=MOST_DRAWS)
    passages: tuple[tuple[int, ...], ...] = ()

    name: ClassVar[str] = "edit"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    on_command_line: ClassVar[bool] = False  # the second step of the gender edit

    def __post_init__(self) -> None:
        normalized(self, neurons=read_neurons(self.neurons))
        check_options(self)
        if not self.neurons:
            raise UserError("no neurons to zero: name at least one")
        if len(set(self.neurons)) < len(self.neurons):
            raise UserError("a neuron is given twice; name each once")
        assert all(len(passage) > 1 for passage in self.passages), "the first token of a passage is read, not scored"

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; the text is its fingerprint."""
        digest = hashlib.sha256(json.dumps(self.passages).encode()).hexdigest()[:16]
        return {
            "neurons": [str(neuron) for neuron in self.neurons],
            "seeds": self.seeds,
            "text": digest if self.passages else None,
        }

    def conditions(self) -> list[Condition]:
        """Each with its seed, which is 0 where nothing is drawn."""
        return [("original", 0), ("edited", 0), *(("random", seed) for seed in range(self.seeds))]

    def neurons_of(self, shape: ModelShape, condition: Condition) -> Sequence[Neuron]:
        """What is zeroed."""
        edit, seed = condition
        if edit == "random":
            return layer_matched_neurons(shape, self.neurons, seed)
        return self.neurons if edit == "edited" else ()

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """For each condition its answers and its text; and the neurons of all."""
        for condition in self.conditions():
            for neuron in self.neurons_of(shape, condition):
                shape.check_neuron(*neuron)
        pieces = [Shard("edit_neurons", 0, cost=0.1)]
        for index, (edit, seed) in enumerate(self.conditions()):
            work = {"edit": edit, "seed": seed}
            pieces.append(Shard("edit_scan", index, work))
            if self.passages:
                pieces.append(Shard("edit_text", index, work, cost=0.5))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each prompt or passage."""
        return {"edit_scan": len(prompts), "edit_text": len(self.passages)}.get(shard.table, 0)

    def prepare(self, subject: Subject) -> EditState:
        """Batches; nothing is computed yet."""
        from mathinterp.experiments.neuron_edit.rows import prepare

        return prepare(subject, self.passages)

    def run(self, state: EditState, shard: Shard) -> pa.Table:
        """Rows of one condition, or the neurons of all."""
        from mathinterp.experiments.neuron_edit.rows import answer_rows, text_rows

        shape = state.anatomy.shape
        if shard.table == "edit_neurons":
            return self._neuron_rows(shape)
        condition = (shard.work["edit"], shard.work["seed"])
        rows = answer_rows if shard.table == "edit_scan" else text_rows
        return rows(state, condition, self.neurons_of(shape, condition))

    def _neuron_rows(self, shape: ModelShape) -> pa.Table:
        rows = [
            {"edit": condition[0], "seed": condition[1], "rank": rank, "layer": layer, "neuron": neuron}
            for condition in self.conditions()
            for rank, (layer, neuron) in enumerate(self.neurons_of(shape, condition), start=1)
        ]
        return pa.Table.from_pylist(rows, EDIT_NEURONS)
