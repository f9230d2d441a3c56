"""How the importances of the comparison between genders are computed.

The lens is linear: on one base the increases of two tokens differ by the shifts of their logits. So the sum over the
vocabulary, which is the work, is done once for all professions that follow the same words.

Shape legend: R lens row (words, scales), P word sequence, K neuron, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.lens.neurons import EndActivations, FrozenScales, NeuronLens, end_activations
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.experiments.gender_neurons.tables import GENDER_NEURONS
from mathinterp.prompts.prompt import TokenizedPrompt

Words = tuple[int, ...]  # token ids up to END
Row = tuple[Words, Words, int | None]  # what is read, whose scales hold, and the token where it must be its own


@dataclass(frozen=True)
class Term:
    """One token of one profession under one gender: a summand of a neuron's importance."""

    prompt: int
    row: int  # of the lens
    target: int  # token id
    stereotyped: bool  # on X_r, else on X_c


@dataclass
class GenderState:
    """What a replica keeps between shards."""

    prompts: Sequence[TokenizedPrompt]
    lens: NeuronLens
    terms: list[Term]
    rows: EndActivations  # R: of the row's words
    scales: FrozenScales  # R: of the row's scale words
    target_R: torch.Tensor  # the first token that is asked of each row


def prepare(subject: Subject) -> GenderState:
    """One pass over all distinct beginnings of sentences."""
    anatomy = subject.anatomy
    lens = NeuronLens(anatomy)
    terms, rows = terms_of(subject.prompts, shared=anatomy.shape.logit_softcap is None)
    sequences = list(dict.fromkeys([*(row[0] for row in rows), *(row[1] for row in rows)]))
    place = {words: index for index, words in enumerate(sequences)}
    activations = end_activations(anatomy, sequences)
    read = activations.rows([place[row[0]] for row in rows])
    scales = lens.frozen_scales(activations.rows([place[row[1]] for row in rows]))
    first = {term.row: term.target for term in reversed(terms)}
    target_R = torch.tensor([first[row] for row in range(len(rows))], device=anatomy.device)
    return GenderState(subject.prompts, lens, terms, read, scales, target_R)


def layer_rows(state: GenderState, layer: int) -> pa.Table:
    """Rows of one layer: every neuron under either stereotype."""
    stereotypes = list(dict.fromkeys(str(prompt.prompt.operation) for prompt in state.prompts))
    sums = importance_sums(state, layer, stereotypes)
    parts = []
    for number, stereotype in enumerate(stereotypes):
        stereotyped_K, other_K = sums[number].cpu().numpy()
        of_stereotype = sum(prompt.prompt.operation == stereotype for prompt in state.prompts)
        columns = {
            "layer": np.full(len(other_K), layer),
            "neuron": np.arange(len(other_K)),
            "stereotype": [stereotype] * len(other_K),
            "professions": np.full(len(other_K), of_stereotype),
            "change": stereotyped_K - other_K,
            "stereotyped": stereotyped_K,
            "other": other_K,
        }
        parts.append(cast_table(GENDER_NEURONS, columns))
    return pa.concat_tables(parts)


def terms_of(prompts: Sequence[TokenizedPrompt], shared: bool) -> tuple[list[Term], list[Row]]:
    """The summands, and the distinct rows of the lens they need.

    shared: tokens that follow the same words share a row; not so under a final soft-cap, where the lens is not linear.
    """
    rows: dict[Row, int] = {}
    terms = []
    for number, prompt in enumerate(prompts):
        assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
        for token in prompt.scored:
            words, others = prompt.input_ids[: token.index], prompt.counterfactual_ids[: token.index]
            for read, stereotyped in ((words, True), (others, False)):
                row = (read, words, None if shared else token.token_id)
                terms.append(Term(number, rows.setdefault(row, len(rows)), token.token_id, stereotyped))
    return terms, list(rows)


def importance_sums(state: GenderState, layer: int, stereotypes: Sequence[str]) -> torch.Tensor:
    """Importances summed over the professions of each stereotype, on X_r and on X_c: stereotype x 2 x K, float64."""
    directions_KV = state.lens.directions(layer)
    reference_RK = state.lens.layer(layer, state.rows, state.scales, state.target_R, directions_KV).neurons_PK
    amounts_RK = state.lens.amounts(layer, state.rows, state.scales)
    sums = torch.zeros(len(stereotypes), 2, directions_KV.shape[0], dtype=torch.float64, device=directions_KV.device)
    for term in state.terms:
        reference = int(state.target_R[term.row])
        increase_K = reference_RK[term.row]
        if term.target != reference:  # the linear lens: the logits' shifts differ by so much
            increase_K = increase_K + amounts_RK[term.row] * (
                directions_KV[:, term.target] - directions_KV[:, reference]
            )
        stereotype = stereotypes.index(str(state.prompts[term.prompt].prompt.operation))
        sums[stereotype, 0 if term.stereotyped else 1] += increase_K
    return sums
