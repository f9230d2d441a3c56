"""Scores of a model as it is in memory, whatever hangs on it, and their rows: for scans that change the model itself.

Knows engines and tables; knows nothing about what was changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from mathinterp.engine.choose import build_engine
from mathinterp.engine.scores import Answers, Scores, answers_of, check_finite
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import BASELINE
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt, with_distractors


@dataclass
class ScoredState:
    """What a replica keeps between conditions; the model is as loaded before and after each."""

    subject: Subject
    answers: Answers

    @classmethod
    def of(cls, subject: Subject) -> Self:
        """Of a replica's model and prompts."""
        return cls(subject, answers_of(with_distractors(subject.prompts)))


def scores_of(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt]) -> Scores:
    """Scores of the model as it is now, adapters and hooks included."""
    engine = build_engine(anatomy, with_distractors(prompts), edits_in_all=1)
    scores = engine.baseline()
    check_finite(scores, ["model"], engine.answers, prompts)
    return scores


def baseline_rows(state: ScoredState) -> pa.Table:
    """Rows of the model as it is."""
    prompts = state.subject.prompts
    return score_table(BASELINE, prompts, state.answers, scores_of(state.subject.anatomy, prompts), {})


def score_table(
    schema: pa.Schema, prompts: Sequence[TokenizedPrompt], answers: Answers, scores: Scores, same: Mapping[str, Any]
) -> pa.Table:
    """A row for each scored token, with columns of one value beside."""
    names = pa.array([prompt.prompt.prompt_id for prompt in prompts], pa.string())
    columns: dict[str, Any] = {
        "prompt_id": names.take(pa.array(answers.prompt_A)),
        "position": answers.position_A,
        "correct": scores.correct_EA[0],
        "logprob": scores.logprob_EA[0],
        "logit": scores.logit_EA[0],
        "predicted_id": scores.predicted_EA[0],
    }
    arrays = [
        pa.array(columns[column.name]).cast(column.type)
        if column.name in columns
        else pa.repeat(pa.scalar(same[column.name], column.type), len(answers))
        for column in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
