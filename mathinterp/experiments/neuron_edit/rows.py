"""How the rows of a neuron edit are computed: prompts and passages of text with a set of neurons at zero."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mathinterp.engine.intervention import zeroed
from mathinterp.engine.placement import everywhere, hooked
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Answers, Scores, answers_of
from mathinterp.experiments.base import Subject
from mathinterp.experiments.neuron_edit.tables import EDIT_SCAN, EDIT_TEXT, Condition
from mathinterp.experiments.scored import score_table, scores_of
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt, with_distractors

TOKENS_IN_A_PASS = 8192


@dataclass
class EditState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    answers: Answers
    text: PlainEngine | None  # passages share nothing: padded batches


def prepare(subject: Subject, passages: Sequence[tuple[int, ...]]) -> EditState:
    """Batches; nothing is computed yet."""
    anatomy, pieces = subject.anatomy, [_passage(number, ids) for number, ids in enumerate(passages)]
    at_once = max(1, TOKENS_IN_A_PASS // max((len(ids) for ids in passages), default=1))
    text = PlainEngine(anatomy, pieces, batch_size=at_once) if pieces else None
    return EditState(anatomy, subject.prompts, answers_of(with_distractors(subject.prompts)), text)


def answer_rows(state: EditState, condition: Condition, neurons: Sequence[Neuron]) -> pa.Table:
    """The prompts' scored tokens with the neurons at zero."""
    with hooked(everywhere(state.anatomy), [zeroed(state.anatomy, neurons)]):
        scores = scores_of(state.anatomy, state.prompts)
    same = {"edit": condition[0], "seed": condition[1]}
    return score_table(EDIT_SCAN, state.prompts, state.answers, scores, same)


def text_rows(state: EditState, condition: Condition, neurons: Sequence[Neuron]) -> pa.Table:
    """Passages' tokens and summed log-probabilities with the neurons at zero."""
    assert state.text is not None
    return _text_rows(state.text, condition, state.text.run([zeroed(state.anatomy, neurons)]))


def _passage(number: int, ids: Sequence[int]) -> TokenizedPrompt:
    """A piece of text as a prompt of which every token but the first is scored."""
    scored = tuple(ScoredToken(i - 1, i, ids[i], "", "text", None) for i in range(1, len(ids)))
    return TokenizedPrompt(Prompt(str(number), "", ""), tuple(ids), scored)


def _text_rows(text: PlainEngine, condition: Condition, scores: Scores) -> pa.Table:
    """Passages' tokens and summed log-probabilities."""
    passages = text.answers.prompt_A
    tokens = np.bincount(passages)
    logprob = np.bincount(passages, weights=scores.logprob_EA[0].astype(np.float64))
    rows = [
        {"edit": condition[0], "seed": condition[1], "passage": i, "tokens": int(tokens[i]), "logprob": logprob[i]}
        for i in range(len(tokens))
    ]
    return pa.Table.from_pylist(rows, EDIT_TEXT)
