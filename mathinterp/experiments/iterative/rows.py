"""How the rows of iterative masking are computed: a sweep over all heads left, with those masked before masked too.

Each step is a sweep that costs as much as a head scan, plus one pass with the earlier heads masked whose layer inputs
are cached, so that a head of layer l runs layers l.. only. Where heads are edited at END alone and the first answer
token is what counts, END's row is all that runs (engine/end_rows.py).

Shape legend: E edit, A answer token, P prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mathinterp.engine.choose import Runner, many_layers
from mathinterp.engine.end_rows import EndRows
from mathinterp.engine.intervention import CLEAN
from mathinterp.engine.scores import Answers, Scores
from mathinterp.experiments.ablated import AblationState, ablated, prepare
from mathinterp.experiments.base import Subject
from mathinterp.experiments.chosen_heads import most_at_once
from mathinterp.experiments.columns import cast_table
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.iterative.tables import ITERATIVE_SCAN
from mathinterp.models.units import Head


@dataclass
class IterativeState:
    """What a replica keeps between shards."""

    ablation: AblationState
    engine: Runner  # that runs the steps
    masked: list[Head]  # so far: the heads of steps 0, 1, ...


def prepare_steps(scan: Iterative, subject: Subject) -> IterativeState:
    """Clean pass (and counterfactual pass) over all prompts."""
    at_once = most_at_once(subject.anatomy.shape.n_heads)
    ablation = prepare(scan, subject, edits_per_batch=at_once, edits_in_all=0)
    if scan.only_end:
        return IterativeState(ablation, EndRows(subject.anatomy, subject.prompts, subject.max_tokens), list(scan.known))
    return IterativeState(ablation, many_layers(ablation.engine), list(scan.known))


def notes(scan: Iterative, state: IterativeState) -> dict[str, Any]:
    """Engine, packing and noise floor of the run; how far passes without a head out stray from the baseline."""
    engine = state.ablation.engine
    counted = np.flatnonzero(engine.answers.position_A == 0) if scan.only_end else np.arange(len(engine.answers))
    deviation = state.engine.run([CLEAN]).difference(engine.baseline().at(counted))
    return {**state.ablation.notes, "no_head_deviation": deviation}


def step_rows(scan: Iterative, state: IterativeState, step: int) -> pa.Table:
    """Rows of one step; steps before it that are not known are done first."""
    while len(state.masked) < step:
        state.masked.append(masked_head(_sweep(scan, state, state.masked)))
    rows = _sweep(scan, state, state.masked[:step])
    if len(state.masked) == step:
        state.masked.append(masked_head(rows))
    return rows


def _sweep(scan: Iterative, state: IterativeState, masked: Sequence[Head]) -> pa.Table:
    """Every head left, masked together with ``masked``: one row each."""
    left = [head for head in scan.candidates(state.ablation.anatomy.shape) if head not in masked]
    base, *others = (ablated(scan, state.ablation, [*masked, *more]) for more in ([], *([head] for head in left)))
    scores = state.engine.run([base, *others], base)
    accuracy_E, logprob_E = operation_means(state.ablation, scores, scan.parameters()["scoring"], state.engine.answers)
    chosen = _choice(scan.rank_by, accuracy_E[1:], logprob_E[1:])
    columns = {
        "step": np.full(len(left), len(masked)),
        "layer": [layer for layer, _ in left],
        "head": [head for _, head in left],
        "masked": np.arange(len(left)) == chosen,
        "accuracy_before": np.full(len(left), accuracy_E[0]),
        "accuracy": accuracy_E[1:],
        "logprob_change": logprob_E[1:] - logprob_E[0],
    }
    return cast_table(ITERATIVE_SCAN, columns)


def _choice(rank_by: str, accuracy_E: np.ndarray, logprob_E: np.ndarray) -> int:
    """Which head costs most; means that differ by rounding alone count as equal."""
    keys = [accuracy_E.round(12), logprob_E.round(12)]
    if rank_by == "logprob":
        keys.reverse()
    return int(np.lexsort((keys[1], keys[0]))[0])


def masked_head(rows: pa.Table) -> Head:
    """The head that a step masks."""
    row = rows["masked"].to_pylist().index(True)
    return Head(rows["layer"][row].as_py(), rows["head"][row].as_py())


def operation_means(
    state: AblationState, scores: Scores, scoring: str, answers: Answers | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy and mean log-probability per unit of each edit (E each), as operation 'all' in the SQL views.

    ``answers`` are those that were scored; None = all of the engine's; distractors do not count.

    The unit is a scored token, the first one under "first_token", or a whole answer under "exact_match".
    """
    answers, prompts = answers or state.engine.answers, state.prompts
    counted = (
        np.flatnonzero(answers.position_A == 0) if scoring == "first_token" else np.flatnonzero(answers.position_A >= 0)
    )
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
