"""Circuits: how much of the logit difference the first nodes of a ranking carry while all others are replaced.

The circuit localization track of MIB (arXiv 2504.13151). m = logit(answer) - logit(distractor) at END; with m(C_k) that
of the circuit of k nodes, m(full) of the model and m(empty) of no node and a replaced input, all means over prompts,

    f(k) = (m(C_k) - m(empty)) / (m(full) - m(empty)),   k = int(fraction * scored nodes)

CPR is the area under f over fractions .001 to 1 (trapezoids), nodes ranked by signed score; CMD the area of |1 - f|,
ranked by absolute score. The input is in every circuit unless a file scores it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.attribution import check_contrasts
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.circuit.ranking import LEVELS, ORDERINGS, NodeScores
from mathinterp.experiments.circuit.tables import FRACTIONS, TABLES
from mathinterp.experiments.options import check_options, normalized, option
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.experiments.circuit.rows import CircuitState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

ABLATIONS = ("resample", "zero", "mean")
PROMPTS_PER_FILE = 64


def read_runs(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Ids of runs: "a,b", or texts; None stays None."""
    if given is None:
        return None
    return tuple(part.strip() for part in (given.split(",") if isinstance(given, str) else given))


@dataclass(frozen=True)
class Circuit(Experiment):
    """Evaluate the circuits that a ranking of nodes gives: faithfulness, CPR and CMD as MIB defines them.

    The ranking is of finished runs of attribution, mask, heads, mlps or paths, or of a circuit file in MIB's JSON.
    Level node: heads and MLPs. Level neuron: MLP neurons of an attribution run with neurons; of a file what MIB calls
    neurons, the coordinates of what each head and MLP (and the input) writes. Nodes without a score stay.
    """

    rank_from: tuple[str, ...] | None = option(
        None, "The run whose scores rank nodes; several that score different nodes (heads and mlps) with commas.",
        flag="from", parse=read_runs, metavar="RUN_ID",
    )  # fmt: skip
    circuit: str | None = option(None, "Take the scores of this circuit file in MIB's JSON.", metavar="FILE")
    level: str = option("node", "What circuits are made of.", choices=LEVELS)
    ablation: str = option(
        "resample",
        "What all else becomes: what it is on the paired counterfactual; zero; or mean, over the tokens of all"
        " counterfactuals.",
        choices=ABLATIONS,
    )
    scores: NodeScores | None = None  # found by ``bind``

    name: ClassVar[str] = "circuit"
    tables: ClassVar[Mapping[str, Table]] = TABLES
    prompt_set: ClassVar[str] = "operand_pairs"
    command_examples: ClassVar[Sequence[str]] = (
        "scan attribution --method eap-ig-inputs --limit 160",
        "scan circuit --from RUN_ID --limit 160",
        "scan circuit --circuit importances.json --level neuron --limit 160",
    )

    def __post_init__(self) -> None:
        normalized(self, rank_from=read_runs(self.rank_from))
        check_options(self)
        if (self.rank_from is None) == (self.circuit is None):
            raise UserError("give the ranking in one way: `rank_from` RUN_ID, or a `circuit` file with scores")
        if self.rank_from is not None and (not all(self.rank_from) or len({*self.rank_from}) < len(self.rank_from)):
            raise UserError(f"`rank_from` '{','.join(self.rank_from)}': name each run once")

    @property
    def needs_counterfactuals(self) -> bool:
        """Those outside the circuit take their output on X_c."""
        return True

    def bind(self, context: Context) -> Self:
        """With the scores of the runs or the file; raises UserError for those of another model."""
        from mathinterp.experiments.circuit.mib_json import read_circuit
        from mathinterp.experiments.circuit.ranking import scores_from

        shape = context.model.shape
        if self.circuit is not None:
            return dataclasses.replace(self, scores=read_circuit(self.circuit, self.level, shape))
        if self.level == "neuron":
            shape.check_neurons()
        found = scores_from(context.store, self.rank_from or (), self.level, context.model)
        return dataclasses.replace(self, scores=found)

    @property
    def ranked(self) -> NodeScores:
        """The scores that ``bind`` found."""
        assert self.scores is not None, "the scores are found by bind"
        return self.scores

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; of a file's scores their fingerprint, those of a run never change."""
        return {
            "rank_from": self.ranked.source,
            "method": self.ranked.method,
            "scores": None if self.circuit is None else self.ranked.fingerprint,
            "level": self.level,
            "ablation": self.ablation,
        }

    def counts(self) -> list[tuple[float, int]]:
        """Each fraction and its number of nodes."""
        return [(fraction, int(fraction * self.ranked.scored)) for fraction in FRACTIONS]

    def different(self) -> int:
        """Circuits that must be run: some fractions have the same nodes."""
        sizes = {count for _, count in self.counts()} - {self.ranked.scored}
        return 2 + len(ORDERINGS) * len(sizes - {0}) + (0 in sizes)  # empty and full; that of k = 0 is one for both

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Files of 64 prompts."""
        check_contrasts(prompts)
        spans = [
            (start, min(start + PROMPTS_PER_FILE, len(prompts))) for start in range(0, len(prompts), PROMPTS_PER_FILE)
        ]
        return [
            Shard("circuit_metric", index, {"prompts": list(span)}, cost=float(span[1] - span[0]))
            for index, span in enumerate(spans)
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each prompt and circuit."""
        start, stop = shard.work["prompts"]
        return int(stop - start) * self.different()

    def prepare(self, subject: Subject) -> CircuitState:
        """The circuits, and under mean ablation the means over all prompts."""
        from mathinterp.experiments.circuit.rows import prepare

        return prepare(self, subject)

    def run(self, state: CircuitState, shard: Shard) -> pa.Table:
        """All circuits on the shard's prompts."""
        from mathinterp.experiments.circuit.rows import rows_of

        start, stop = shard.work["prompts"]
        return rows_of(self, state, state.subject.prompts[start:stop])
