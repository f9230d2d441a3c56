"""What zeroing a set of neurons does to answers and to ordinary text, against random neurons.

Conditions: "original"; "edited", the given neurons zeroed at every token; "random", as many others in each layer, once
for each of a few seeds. Per condition the scored tokens of all prompts, and the log-probability of every passage of a
text (its perplexity is a view). Zeroing a neuron equals zeroing its column of down_proj (method.md section 2).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mathinterp.engine.neuron_sets import Neuron, NeuronMask, NeuronSets, neuron_mask, zeroed_neurons
from mathinterp.engine.scores import Answers, Scores, answers_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.neuron_controls import layer_matched_neurons
from mathinterp.experiments.neuron_edit.tables import EDIT_NEURONS, EDIT_SCAN, EDIT_TEXT, TABLES
from mathinterp.experiments.scored import score_table, scores_of
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt

TOKENS_IN_A_PASS = 8192
Condition = tuple[str, int]  # original, edited or random; and the seed


@dataclass
class EditState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    answers: Answers
    text: NeuronSets | None  # passages share nothing: padded batches


@dataclass(frozen=True)
class NeuronEdit(Experiment):
    """Score prompts and text with ``neurons`` zeroed.

    neurons: most important first.
    seeds: random draws, seeds 0, 1, ...
    passages: token ids of pieces of text, each of at least two tokens; may be empty.
    """

    neurons: tuple[Neuron, ...] = ()
    seeds: int = 5
    passages: tuple[tuple[int, ...], ...] = ()

    name: ClassVar[str] = "edit"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        if not self.neurons:
            raise UserError("no neurons to zero: name at least one")
        if len(set(self.neurons)) < len(self.neurons):
            raise UserError("a neuron is given twice; name each once")
        if self.seeds < 0:
            raise UserError(f"{self.seeds} random draws cannot be made; give 0 or more")
        assert all(len(passage) > 1 for passage in self.passages), "the first token of a passage is read, not scored"

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; the text is its fingerprint."""
        digest = hashlib.sha256(json.dumps(self.passages).encode()).hexdigest()[:16]
        return {
            "neurons": [f"{layer}.{neuron}" for layer, neuron in self.neurons],
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
            _check(shape, self.neurons_of(shape, condition))
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
        anatomy, passages = subject.anatomy, [_passage(number, ids) for number, ids in enumerate(self.passages)]
        at_once = max(1, TOKENS_IN_A_PASS // max((len(ids) for ids in self.passages), default=1))
        text = NeuronSets(anatomy, passages, batch_size=at_once) if passages else None
        return EditState(anatomy, subject.prompts, answers_of(subject.prompts), text)

    def run(self, state: EditState, shard: Shard) -> pa.Table:
        """Rows of one condition, or the neurons of all."""
        if shard.table == "edit_neurons":
            return self._neuron_rows(state.anatomy.shape)
        condition = (shard.work["edit"], shard.work["seed"])
        mask: NeuronMask = neuron_mask(state.anatomy, self.neurons_of(state.anatomy.shape, condition))
        if shard.table == "edit_scan":
            with zeroed_neurons(state.anatomy, mask):
                scores = scores_of(state.anatomy, state.prompts)
            same = {"edit": condition[0], "seed": condition[1]}
            return score_table(EDIT_SCAN, state.prompts, state.answers, scores, same)
        assert state.text is not None
        return _text_rows(state.text, condition, state.text.run_masks([mask]))

    def _neuron_rows(self, shape: ModelShape) -> pa.Table:
        rows = [
            {"edit": condition[0], "seed": condition[1], "rank": rank, "layer": layer, "neuron": neuron}
            for condition in self.conditions()
            for rank, (layer, neuron) in enumerate(self.neurons_of(shape, condition), start=1)
        ]
        return pa.Table.from_pylist(rows, EDIT_NEURONS)


def _check(shape: ModelShape, neurons: Sequence[Neuron]) -> None:
    for layer, neuron in neurons:
        shape.check_layer(layer)
        if not 0 <= neuron < shape.n_neurons:
            raise UserError(
                f"neuron {layer}.{neuron} does not exist: each layer has neurons 0 to {shape.n_neurons - 1}"
            )


def _passage(number: int, ids: Sequence[int]) -> TokenizedPrompt:
    """A piece of text as a prompt of which every token but the first is scored."""
    scored = tuple(ScoredToken(i - 1, i, ids[i], "", "text", None) for i in range(1, len(ids)))
    return TokenizedPrompt(Prompt(str(number), "", ""), tuple(ids), scored)


def _text_rows(text: NeuronSets, condition: Condition, scores: Scores) -> pa.Table:
    """Passages' tokens and summed log-probabilities."""
    passages = text.answers.prompt_A
    tokens = np.bincount(passages)
    logprob = np.bincount(passages, weights=scores.logprob_EA[0].astype(np.float64))
    rows = [
        {"edit": condition[0], "seed": condition[1], "passage": i, "tokens": int(tokens[i]), "logprob": logprob[i]}
        for i in range(len(tokens))
    ]
    return pa.Table.from_pylist(rows, EDIT_TEXT)
