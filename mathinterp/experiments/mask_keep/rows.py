"""How rows of mask and keep are computed: passes over all prompts, each with neurons of its own at zero.

Shape legend: P prompt, R place in the prompt's ranking, k places masked or kept, K neuron of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.intervention import Change, Intervention, Value
from mathinterp.engine.plain import PlainEngine
from mathinterp.experiments.ablated import AblationState, score_rows
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import BASELINE, cast_table
from mathinterp.experiments.mask_keep.ranked import random_neurons
from mathinterp.experiments.mask_keep.tables import MASKKEEP_NEURONS, MASKKEEP_SCAN
from mathinterp.prompts.prompt import with_distractors

TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 8192}  # in one forward pass, padding included


@dataclass
class MaskKeepState:
    """What a replica keeps between shards."""

    ablation: AblationState
    deep: Sequence[int]  # layers whose other neurons "keep" zeroes
    layer_PR: np.ndarray
    rankings: dict[tuple[str, int], np.ndarray]  # (ranking, seed) -> neuron_PR; filled as seeds are asked for

    def neurons(self, ranking: str, seed: int) -> np.ndarray:
        """neuron_PR of a ranking; its layers are those of the prompts' own ranking."""
        if (ranking, seed) not in self.rankings:
            n_neurons, top_PR = self.ablation.anatomy.shape.n_neurons, self.rankings["top", 0]
            self.rankings[ranking, seed] = random_neurons(self.layer_PR, top_PR, n_neurons, seed)
        return self.rankings[ranking, seed]


def prepare(subject: Subject, deep: Sequence[int], layer_PR: np.ndarray, neuron_PR: np.ndarray) -> MaskKeepState:
    """The runner of padded passes."""
    anatomy, prompts = subject.anatomy, with_distractors(subject.prompts)
    tokens = subject.max_tokens or TOKENS_AT_ONCE["cuda" if anatomy.device.type == "cuda" else "cpu"]
    engine = PlainEngine(anatomy, prompts, batch_size=max(1, tokens // max(len(prompt.fed) for prompt in prompts)))
    ablation = AblationState(anatomy, prompts, engine, None, {})
    return MaskKeepState(ablation, deep, layer_PR, {("top", 0): neuron_PR})


def noise_floor(state: MaskKeepState) -> float:
    """How far a pass whose masks zero nothing strays from the baseline."""
    anatomy, engine = state.ablation.anatomy, state.ablation.engine
    nothing_PK = torch.zeros(len(state.layer_PR), anatomy.shape.n_neurons, dtype=torch.bool)
    masked = engine.run([(Change("neuron", 0, nothing_PK, Value.zero(anatomy, "neuron", 0)),)])
    return masked.difference(engine.baseline())


def baseline_rows(state: MaskKeepState) -> pa.Table:
    """Rows of the unchanged model."""
    return score_rows(state.ablation, state.ablation.engine.baseline(), BASELINE, {})


def scan_rows(state: MaskKeepState, mode: str, ranking: str, seed: int, ks: Sequence[int]) -> pa.Table:
    """Rows of one mode, ranking and seed, for each k."""
    neuron_PR, parts = state.neurons(ranking, seed), []
    for k in ks:
        mask = _mask(state, mode, state.layer_PR[:, :k], neuron_PR[:, :k])
        ids: dict[str, Any] = {"mode": [mode], "ranking": [ranking], "seed": [seed], "k": [k]}
        parts.append(score_rows(state.ablation, state.ablation.engine.run([mask]), MASKKEEP_SCAN, ids))
    return pa.concat_tables(parts)


def _mask(state: MaskKeepState, mode: str, layer_Pk: np.ndarray, neuron_Pk: np.ndarray) -> Intervention:
    """What is zeroed in each prompt. mask: the neurons given; keep: all others of the deep layers."""
    anatomy, changes = state.ablation.anatomy, []
    for layer in state.deep if mode == "keep" else np.unique(layer_Pk).tolist():
        prompt_n, place_n = np.nonzero(layer_Pk == layer)
        given_PK = torch.zeros(len(layer_Pk), anatomy.shape.n_neurons, dtype=torch.bool)
        given_PK[prompt_n, neuron_Pk[prompt_n, place_n]] = True
        zeroed_PK = given_PK if mode == "mask" else ~given_PK
        changes.append(Change("neuron", layer, zeroed_PK, Value.zero(anatomy, "neuron", layer)))
    return tuple(changes)


def neuron_rows(state: MaskKeepState, ranking: str, seed: int) -> pa.Table:
    """Which neurons are masked, or kept, under one ranking."""
    neuron_PR = state.neurons(ranking, seed)
    prompts, places = neuron_PR.shape
    names = pa.array([prompt.prompt.prompt_id for prompt in state.ablation.prompts])
    columns: dict[str, Any] = {
        "ranking": pa.repeat(pa.scalar(ranking), prompts * places),
        "seed": np.full(prompts * places, seed),
        "prompt_id": names.take(pa.array(np.repeat(np.arange(prompts), places))),
        "place": np.tile(np.arange(1, places + 1), prompts),
        "layer": state.layer_PR.ravel(),
        "neuron": neuron_PR.ravel(),
    }
    return cast_table(MASKKEEP_NEURONS, columns)
