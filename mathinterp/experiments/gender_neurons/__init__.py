"""Comparative Neuron Analysis between genders: which FFN neurons add to a profession after one gender alone.

Paper A section 6.2, method.md section 6. For each profession w, X_r is the first sentence with the gender that w is
stereotyped as, X_c the same with the other gender. A neuron's importance for w is the increase of log p(w) that adding
its coefficient times its value to the stream at END gives; w of several tokens: the sum over its tokens, each at the
END before it, the gold tokens before it read. change = importance on X_r - importance on X_c, both under the scales of
X_r, summed over professions: what a neuron adds to the stereotype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.gender_neurons.tables import TABLES
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.experiments.gender_neurons.rows import GenderState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

SHOWN = 18  # neurons, as many as paper A zeroes


@dataclass(frozen=True)
class GenderNeurons(Experiment):
    """Every neuron's change, summed over the professions of either stereotype; prompts: prompts/gender.py."""

    name: ClassVar[str] = "gender_neurons"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    on_command_line: ClassVar[bool] = False  # the first step of the gender edit

    @property
    def needs_counterfactuals(self) -> bool:
        """X_c, the other gender, comes with the prompts."""
        return True

    def parameters(self) -> dict[str, Any]:
        """Nothing but the prompts decides the rows."""
        return {"change": "stereotyped - other"}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One per layer."""
        return [Shard("gender_neurons", layer, {"layers": [layer]}) for layer in range(shape.n_layers)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each scored token and gender."""
        return 2 * sum(len(prompt.scored) for prompt in prompts)

    def prepare(self, subject: Subject) -> GenderState:
        """One pass over all distinct beginnings of sentences."""
        from mathinterp.experiments.gender_neurons.rows import prepare

        return prepare(subject)

    def run(self, state: GenderState, shard: Shard) -> pa.Table:
        """Rows of one layer: every neuron under either stereotype."""
        from mathinterp.experiments.gender_neurons.rows import layer_rows

        return layer_rows(state, shard.work["layers"][0])

    @classmethod
    def summarize(cls, results: Results, shown: Any) -> Summary:
        """The neurons that add most to the stereotypes."""
        query = f"""SELECT rank, layer || '.' || neuron AS neuron, change, change_woman, change_man
            FROM gender_neurons WHERE run_id = $run AND rank <= {SHOWN} ORDER BY rank"""
        neurons = results.rows(query)
        title = "Neurons that add most to the stereotypes, nats over all professions"
        return Summary([Shown(title, neurons)], {"neurons": neurons}, [results.query(query)])
