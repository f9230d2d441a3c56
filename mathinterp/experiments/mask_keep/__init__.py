"""Mask and keep: do a prompt's first neurons carry its answer? (paper A, Tables 5, 15 and 19; method.md section 5)

Each prompt comes with neurons of its own, the first first, from a neuron scan. mask: its first k are zeroed. keep: all
*other* neurons of the deep layers are zeroed, earlier layers stay whole. The same with random neurons: for each of a
prompt's neurons another one of the same layer. Neurons are zeroed at every position. One row per (mode, ranking, seed,
k, prompt, scored token); the unchanged model's rows are the baseline.

Shape legend: P prompt, R place in the prompt's ranking, K neuron of a layer.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.neuron_sets import NeuronMask, NeuronSets
from mathinterp.errors import UserError
from mathinterp.experiments.ablated import AblationState, score_rows
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.mask_keep.tables import MASKKEEP_NEURONS, MASKKEEP_SCAN, TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

DEFAULT_KS = (99, 50, 30, 20, 10)  # paper A's
MODES = ("mask", "keep")
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 8192}  # in one forward pass, padding included
FIRST_DEEP, OF_LAYERS = 17, 32  # paper A: layers 17 to 31 of 32 are deep


@dataclass(frozen=True, eq=False)
class RankedNeurons:
    """Each prompt's neurons, most important first. Travels inside the scan; the run's parameters hold its fingerprint.

    source: the neuron scan's run.
    """

    source: str
    prompt_ids: tuple[str, ...]
    layer_PR: np.ndarray
    neuron_PR: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the prompts and their neurons in order."""
        digest = hashlib.sha256(json.dumps(self.prompt_ids).encode())
        for values_PR in (self.layer_PR, self.neuron_PR):
            digest.update(np.ascontiguousarray(values_PR, "<i4").tobytes())
        return digest.hexdigest()[:16]

    def of(self, prompts: Sequence[TokenizedPrompt]) -> tuple[np.ndarray, np.ndarray]:
        """layer_PR and neuron_PR of these prompts, in their order; raises UserError for a prompt without neurons."""
        row_of = {prompt_id: row for row, prompt_id in enumerate(self.prompt_ids)}
        for prompt in prompts:
            if prompt.prompt.prompt_id not in row_of:
                raise UserError(
                    f"run {self.source} ranked no neurons for prompt '{prompt.prompt.prompt_id}'; give the --prompts,"
                    " --limit and --seed that it was given"
                )
        rows = [row_of[prompt.prompt.prompt_id] for prompt in prompts]
        return self.layer_PR[rows], self.neuron_PR[rows]


@dataclass
class MaskKeepState:
    """What a replica keeps between shards."""

    ablation: AblationState
    runner: NeuronSets
    layer_PR: np.ndarray
    rankings: dict[tuple[str, int], np.ndarray]  # (ranking, seed) -> neuron_PR; filled as seeds are asked for


@dataclass(frozen=True)
class MaskKeep(Experiment):
    """Mask and keep the first k neurons of each prompt, for each of ``ks``.

    neurons: at least as many of each prompt as the largest k.
    seeds: random draws, seeds 0, 1, ...
    deep_layers: whose other neurons "keep" zeroes; None = from layer ``first_deep_layer`` on.
    """

    neurons: RankedNeurons
    ks: tuple[int, ...] = DEFAULT_KS
    seeds: int = 3
    deep_layers: tuple[int, ...] | None = None

    name: ClassVar[str] = "maskkeep"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise UserError("the numbers of neurons to mask and keep must be 1 or more; name at least one")
        if self.seeds < 0:
            raise UserError(f"{self.seeds} random draws cannot be made; give 0 or more")
        if self.deep_layers == ():
            raise UserError("no deep layers; name at least one, or leave --deep-layers out")
        places = self.neurons.neuron_PR.shape[1]
        if places < max(self.ks):
            raise UserError(
                f"run {self.neurons.source} ranks {places} neurons of each prompt, k = {max(self.ks)} asked"
            )

    def deep(self, shape: ModelShape) -> list[int]:
        """The layers whose other neurons "keep" zeroes; raises UserError for one that does not exist."""
        if self.deep_layers is None:
            return list(range(first_deep_layer(shape.n_layers), shape.n_layers))
        for layer in self.deep_layers:
            shape.check_layer(layer)
        return sorted(set(self.deep_layers))

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; of the neurons their fingerprint."""
        return {
            "neurons_from": self.neurons.source,
            "neurons": self.neurons.fingerprint,
            "ks": sorted(set(self.ks)),
            "control_seeds": self.seeds,
            "deep_layers": None if self.deep_layers is None else sorted(set(self.deep_layers)),
            "positions": "all",
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, the neurons of every ranking, and one file for each mode, ranking and seed.

        Raises UserError for prompts without neurons and for random draws that a layer has too few neurons for.
        """
        self.deep(shape)
        layer_PR, neuron_PR = self._first(prompts)
        assert layer_PR.max() < shape.n_layers, "a ranked neuron of a layer that the model has not"
        assert neuron_PR.max() < shape.n_neurons, "a ranked neuron that the model has not"
        if self.seeds:
            check_room(layer_PR, shape.n_neurons, prompts)
        curves = [(mode, ranking, seed) for mode in MODES for ranking, seed in self._rankings()]
        work = [{"mode": mode, "ranking": ranking, "seed": seed} for mode, ranking, seed in curves]
        pieces = [Shard("maskkeep_scan", index, item, float(len(set(self.ks)))) for index, item in enumerate(work)]
        return [Shard("baseline", 0, cost=0.5), Shard("maskkeep_neurons", 0, cost=0.1), *pieces]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (k, prompt)."""
        return {"baseline": 1, "maskkeep_scan": len(set(self.ks))}.get(shard.table, 0) * len(prompts)

    def prepare(self, subject: Subject) -> MaskKeepState:
        """The runner of padded passes; the prompts' neurons as arrays."""
        anatomy, prompts = subject.anatomy, subject.prompts
        tokens = subject.max_tokens or TOKENS_AT_ONCE["cuda" if anatomy.device.type == "cuda" else "cpu"]
        runner = NeuronSets(anatomy, prompts, batch_size=max(1, tokens // max(len(prompt.fed) for prompt in prompts)))
        layer_PR, neuron_PR = self._first(prompts)
        ablation = AblationState(anatomy, prompts, runner, None, {})
        return MaskKeepState(ablation, runner, layer_PR, {("top", 0): neuron_PR})

    def notes(self, state: MaskKeepState) -> dict[str, Any]:
        """The deep layers, and how far a pass whose masks zero nothing strays from the baseline."""
        shape = state.ablation.anatomy.shape
        nothing = {0: torch.zeros(len(state.layer_PR), shape.n_neurons, dtype=torch.bool)}
        floor = state.runner.run_masks([nothing]).difference(state.runner.run_masks([{}]))
        return {"engine": state.runner.name, "deep_layers": self.deep(shape), "noise_floor": floor}

    def run(self, state: MaskKeepState, shard: Shard) -> pa.Table:
        """Rows of one mode, ranking and seed, or of one of the small tables."""
        if shard.table == "baseline":
            return score_rows(state.ablation, state.runner.run_masks([{}]), BASELINE, {})
        if shard.table == "maskkeep_neurons":
            return pa.concat_tables([self._neuron_rows(state, *which) for which in self._rankings()])
        mode, ranking, seed = shard.work["mode"], shard.work["ranking"], shard.work["seed"]
        neuron_PR = self._neurons(state, ranking, seed)
        parts = []
        for k in sorted(set(self.ks)):
            mask = self._mask(state.ablation.anatomy, mode, state.layer_PR[:, :k], neuron_PR[:, :k])
            ids: dict[str, Any] = {"mode": [mode], "ranking": [ranking], "seed": [seed], "k": [k]}
            parts.append(score_rows(state.ablation, state.runner.run_masks([mask]), MASKKEEP_SCAN, ids))
        return pa.concat_tables(parts)

    def _first(self, prompts: Sequence[TokenizedPrompt]) -> tuple[np.ndarray, np.ndarray]:
        layer_PR, neuron_PR = self.neurons.of(prompts)
        return layer_PR[:, : max(self.ks)], neuron_PR[:, : max(self.ks)]

    def _rankings(self) -> list[tuple[str, int]]:
        return [("top", 0), *(("random", seed) for seed in range(self.seeds))]

    def _neurons(self, state: MaskKeepState, ranking: str, seed: int) -> np.ndarray:
        """neuron_PR of a ranking; its layers are those of the prompts' own ranking."""
        if (ranking, seed) not in state.rankings:
            n_neurons = state.ablation.anatomy.shape.n_neurons
            top_PR = state.rankings["top", 0]
            state.rankings[ranking, seed] = random_neurons(state.layer_PR, top_PR, n_neurons, seed)
        return state.rankings[ranking, seed]

    def _mask(self, anatomy: Anatomy, mode: str, layer_Pk: np.ndarray, neuron_Pk: np.ndarray) -> NeuronMask:
        """What is zeroed: layer -> P K. mask: the neurons given; keep: all others of the deep layers."""
        layers = self.deep(anatomy.shape) if mode == "keep" else np.unique(layer_Pk).tolist()
        mask = {}
        for layer in layers:
            prompt_n, place_n = np.nonzero(layer_Pk == layer)
            given_PK = torch.zeros(len(layer_Pk), anatomy.shape.n_neurons, dtype=torch.bool)
            given_PK[prompt_n, neuron_Pk[prompt_n, place_n]] = True
            mask[layer] = given_PK if mode == "mask" else ~given_PK
        return mask

    def _neuron_rows(self, state: MaskKeepState, ranking: str, seed: int) -> pa.Table:
        neuron_PR = self._neurons(state, ranking, seed)
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
        schema = MASKKEEP_NEURONS
        return pa.Table.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in schema], schema=schema)


def first_deep_layer(n_layers: int) -> int:
    """The first deep layer: 17 of 32, in proportion for other depths, rounded to the nearest (a half up).

    32 layers: 17; 30: 16; 28: 15; 8: 4. A model of one layer has that one.
    """
    return min(n_layers - 1, (2 * FIRST_DEEP * n_layers + OF_LAYERS) // (2 * OF_LAYERS))


def check_room(layer_PR: np.ndarray, n_neurons: int, prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise UserError where a prompt's neurons leave fewer others in a layer: there would be no random ones for all."""
    for layer in np.unique(layer_PR):
        taken_P = (layer_PR == layer).sum(axis=1)
        worst = int(taken_P.argmax())
        if 2 * taken_P[worst] > n_neurons:
            raise UserError(
                f"prompt '{prompts[worst].prompt.prompt_id}' has {taken_P[worst]} of the {n_neurons} neurons of layer"
                f" {layer} among its first: too few others are left for random controls; give smaller --ks or"
                " --control-seeds 0"
            )


def random_neurons(layer_PR: np.ndarray, neuron_PR: np.ndarray, n_neurons: int, seed: int) -> np.ndarray:
    """For each neuron another of its layer, none of the prompt's own and none twice in a prompt: P R.

    Places keep their layer, so the first k stand for the first k. The draw of prompt number p depends on (seed, p).
    """
    drawn_PR = np.empty_like(neuron_PR)
    for p, (layers, own) in enumerate(zip(layer_PR, neuron_PR, strict=True)):
        rng = np.random.default_rng([seed, p])
        for layer in np.unique(layers):
            places = np.flatnonzero(layers == layer)
            others = np.delete(np.arange(n_neurons), own[places])
            drawn_PR[p, places] = rng.choice(others, len(places), replace=False)
    return drawn_PR
