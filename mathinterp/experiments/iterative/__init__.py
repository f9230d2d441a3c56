"""Iterative masking: mask the head that costs most, rank all others again with it masked, and so on (method.md sec. 3).

A ranking that sees redundancy: a head whose work a second one takes over costs little by itself. Step s scores every
head left with the s heads of the steps before masked too; each step is a sweep of the dearness of a head scan, plus
one pass with the earlier heads masked whose layer inputs are cached, so that a head of layer l runs layers l.. only.
Where heads are edited at END alone and the first answer token is what counts, END's row is all that runs (end_sets.py).
One row per (step, head): the choice needs its average there and then. A step needs those before it, so one replica
does them in order; given the heads of finished steps (``known``) it goes on from there, else it finds them again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mathinterp.engine.end_rows import EndHeadSets
from mathinterp.engine.head_sets import NO_HEADS, head_sets
from mathinterp.engine.scores import Answers, Scores
from mathinterp.errors import UserError
from mathinterp.experiments.ablated import AblationState, prepare
from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.chosen_heads import chosen_heads, most_at_once
from mathinterp.experiments.controls import Head
from mathinterp.experiments.costs import Cost
from mathinterp.experiments.iterative.tables import ITERATIVE_SCAN, TABLES
from mathinterp.experiments.knockout import KnockoutState, replacements_of
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

RANK_BY = ("accuracy", "logprob")


@dataclass
class IterativeState(KnockoutState):
    """A replica's state, and the heads masked so far: those of steps 0, 1, ..."""

    masked: list[Head]
    answers: Answers  # that the runner scores


@dataclass(frozen=True)
class Iterative(Ablation):
    """Mask ``steps`` heads one after another; see Ablation for the rest (here mean ablation is the default).

    rank_by: "accuracy" masks the head that leaves the lowest accuracy (ties: the lowest log-probability, then the
        lower layer and head), "logprob" the other way about. Both are unweighted means over operations.
    layers: the heads of these layers alone; None = all.
    known: the heads of the first steps, where these are in the store already; changes no row.
    """

    ablation: str = "mean"
    steps: int = 8
    rank_by: str = "accuracy"
    layers: tuple[int, ...] | None = None
    known: tuple[Head, ...] = field(default=(), compare=False)

    name: ClassVar[str] = "iterative"
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank_by not in RANK_BY:
            raise UserError(f"--rank-by '{self.rank_by}' is not known; take one of {', '.join(RANK_BY)}")
        if self.steps < 1:
            raise UserError(f"{self.steps} steps cannot be made; give at least 1")

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
        """One file a step; dearest first is the first step first."""
        heads = len(self.candidates(shape))
        if self.steps > heads:
            raise UserError(f"cannot mask {self.steps} heads one after another: there are {heads}")
        return [Shard("iterative_scan", step, {"step": step}, cost=float(heads - step)) for step in range(self.steps)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (head left, prompt); the cost of a step is its number of heads."""
        return int(shard.cost) * len(prompts)

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """See cost.py."""
        from mathinterp.experiments.iterative.cost import cost_of

        return cost_of(self, shape, prompts, shards)

    def prepare(self, subject: Subject) -> IterativeState:
        """Clean pass (and counterfactual pass) over all prompts."""
        at_once = most_at_once(subject.anatomy.shape.n_heads)
        ablation = prepare(self, subject, edits_per_batch=at_once, edits_in_all=0)
        if not self.only_end:
            answers = ablation.engine.answers
            return IterativeState(ablation, head_sets(ablation.engine), {}, list(self.known), answers)
        runner = EndHeadSets(subject.anatomy, subject.prompts, subject.max_tokens)
        return IterativeState(ablation, runner, {}, list(self.known), runner.answers)

    @property
    def only_end(self) -> bool:
        """Whether nothing but END's row changes and counts."""
        return self.edited_positions == "end" and self.parameters()["scoring"] == "first_token"

    def notes(self, state: IterativeState) -> dict[str, Any]:
        """Engine, packing and noise floor of the run; how far passes without a head out stray from the baseline."""
        engine = state.ablation.engine
        counted = np.flatnonzero(engine.answers.position_A == 0) if self.only_end else np.arange(len(engine.answers))
        deviation = state.runner.run_sets([NO_HEADS], {}).difference(engine.baseline().at(counted))
        return {**state.ablation.notes, "no_head_deviation": deviation}

    def run(self, state: IterativeState, shard: Shard) -> pa.Table:
        """Rows of one step; steps before it that are not known are done first."""
        step = shard.work["step"]
        while len(state.masked) < step:
            state.masked.append(masked_head(self._sweep(state, state.masked)))
        rows = self._sweep(state, state.masked[:step])
        if len(state.masked) == step:
            state.masked.append(masked_head(rows))
        return rows

    def _sweep(self, state: IterativeState, masked: Sequence[Head]) -> pa.Table:
        """Every head left, masked together with ``masked``: one row each."""
        shape, base = state.ablation.anatomy.shape, frozenset(masked)
        left = [head for head in self.candidates(shape) if head not in base]
        layers = {layer for layer, _ in [*left, *masked]}
        sets = [base, *(base | {head} for head in left)]
        scores = state.runner.run_sets(sets, replacements_of(self, state, layers), base)
        accuracy_E, logprob_E = operation_means(state.ablation, scores, self.parameters()["scoring"], state.answers)
        chosen = self._choice(accuracy_E[1:], logprob_E[1:])
        columns = {
            "step": np.full(len(left), len(masked)),
            "layer": [layer for layer, _ in left],
            "head": [head for _, head in left],
            "masked": np.arange(len(left)) == chosen,
            "accuracy_before": np.full(len(left), accuracy_E[0]),
            "accuracy": accuracy_E[1:],
            "logprob_change": logprob_E[1:] - logprob_E[0],
        }
        arrays = [pa.array(columns[f.name]).cast(f.type) for f in ITERATIVE_SCAN]
        return pa.Table.from_arrays(arrays, schema=ITERATIVE_SCAN)

    def _choice(self, accuracy_E: np.ndarray, logprob_E: np.ndarray) -> int:
        """Which head costs most; means that differ by rounding alone count as equal."""
        keys = [accuracy_E.round(12), logprob_E.round(12)]
        if self.rank_by == "logprob":
            keys.reverse()
        return int(np.lexsort((keys[1], keys[0]))[0])


def masked_head(rows: pa.Table) -> Head:
    """The head that a step masks."""
    row = rows["masked"].to_pylist().index(True)
    return rows["layer"][row].as_py(), rows["head"][row].as_py()


def operation_means(
    state: AblationState, scores: Scores, scoring: str, answers: Answers | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy and mean log-probability per unit of each edit (E each), as operation 'all' in the SQL views.

    ``answers`` are those that were scored; None = all of the engine's.

    The unit is a scored token, the first one under "first_token", or a whole answer under "exact_match".
    """
    answers, prompts = answers or state.engine.answers, state.prompts
    counted = np.flatnonzero(answers.position_A == 0) if scoring == "first_token" else np.arange(len(answers))
    prompt_A = answers.prompt_A[counted]
    tokens_P = np.bincount(prompt_A, minlength=len(prompts)).astype(float)
    right_PE, logprob_PE = np.zeros((2, len(prompts), len(scores.correct_EA)))
    np.add.at(right_PE, prompt_A, scores.correct_EA[:, counted].T)
    np.add.at(logprob_PE, prompt_A, scores.logprob_EA[:, counted].T)
    units_P = tokens_P
    if scoring == "exact_match":
        right_PE, units_P = (right_PE == tokens_P[:, None]).astype(float), np.ones(len(prompts))
    operation_P = np.array([prompt.prompt.operation or "none" for prompt in prompts])
    accuracies, logprobs = [], []
    for operation in sorted(set(operation_P)):
        rows = operation_P == operation
        accuracies.append(right_PE[rows].sum(axis=0) / units_P[rows].sum())
        logprobs.append(logprob_PE[rows].sum(axis=0) / units_P[rows].sum())
    return np.mean(accuracies, axis=0), np.mean(logprobs, axis=0)
