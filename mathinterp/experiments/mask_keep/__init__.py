"""Mask and keep: do a prompt's first neurons carry its answer? (paper A, Tables 5, 15 and 19; method.md section 5)

Each prompt comes with neurons of its own, the first first, from a neuron scan. mask: its first k are zeroed. keep: all
*other* neurons of the deep layers are zeroed, earlier layers stay whole. The same with random neurons: for each of a
prompt's neurons another one of the same layer. Neurons are zeroed at every position. One row per (mode, ranking, seed,
k, prompt, scored token); the unchanged model's rows are the baseline.

Shape legend: P prompt, R place in the prompt's ranking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.ablation import SCORINGS
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.mask_keep.tables import TABLES
from mathinterp.experiments.options import check_options, normalized, option, read_counts, read_layers
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_DRAWS

if TYPE_CHECKING:
    import numpy as np

    from mathinterp.experiments.mask_keep.ranked import RankedNeurons
    from mathinterp.experiments.mask_keep.rows import MaskKeepState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

DEFAULT_KS = (99, 50, 30, 20, 10)  # paper A's
MODES = ("mask", "keep")
CASES = ("correct", "flipped", "all")


@dataclass(frozen=True)
class MaskKeepShown:
    """Options of the summary."""

    cases: str = option("correct", "Prompts shown.", choices=CASES)
    scoring: str = option("token", "What is shown; neurons are ranked for the first token.", choices=SCORINGS)


@dataclass(frozen=True)
class MaskKeep(Experiment):
    """Zero each prompt's first k neurons (mask), or all other neurons of the deep layers (keep).

    Tables 5, 15 and 19 of paper A, with random neurons of the same layers beside them. Which neurons: those that rank
    first for the prompt, all layers together, in a run of 'scan neurons'. Model and prompts are to be that run's; fewer
    prompts are fine. Rows of all prompts and tokens are stored, whatever is shown of them. Neurons are ranked for the
    first answer token, which the scoring first_token counts alone.
    """

    neurons_from: str = option(
        dataclasses.MISSING, "The finished 'scan neurons' run that ranks the neurons.",
        flag="from", former=("neurons-from",), metavar="RUN_ID",
    )  # fmt: skip
    ks: tuple[int, ...] = option(
        DEFAULT_KS, "Numbers of neurons per prompt.", parse=partial(read_counts, least=1), shown="99,50,30,20,10"
    )
    control_seeds: int = option(3, "Draws of random neurons.", least=0, most=MOST_DRAWS)
    deep_layers: tuple[int, ...] | None = option(
        None,
        "Whose other neurons keep zeroes, for example 17-31 (in 'chain' deep means from the zeroed head's layer on).",
        parse=partial(read_layers, field="deep_layers"),
        shown="from the layer nearest to 17/32 of the depth on",
    )
    neurons: RankedNeurons | None = None  # each prompt's first, from that run; found by ``bind``

    name: ClassVar[str] = "maskkeep"
    own_command: ClassVar[bool] = True
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}
    show_options: ClassVar[type] = MaskKeepShown
    command_examples: ClassVar[Sequence[str]] = (
        "scan neurons --against head:0.6 --limit 160",
        "scan maskkeep --from RUN_ID --limit 160",
        "scan maskkeep --from RUN_ID --limit 160 --ks 99,10 --cases flipped --scoring first_token",
    )

    def __post_init__(self) -> None:
        ks = read_counts(self.ks, least=1) or ()
        normalized(self, ks=ks, deep_layers=read_layers(self.deep_layers, "deep_layers"))
        check_options(self)
        if not self.ks or min(self.ks) < 1:
            raise UserError("`ks`: the numbers of neurons to mask and keep must be 1 or more; name at least one")
        if self.deep_layers == ():
            raise UserError("no deep layers; name at least one, or leave `deep_layers` out")

    def bind(self, context: Context) -> Self:
        """With each prompt's neurons; raises UserError for a run of another model or of other prompts."""
        from mathinterp.experiments.mask_keep.ranked import neurons_from
        from mathinterp.experiments.neurons.stored import check_model, neuron_run

        run = neuron_run(context.store, self.neurons_from)
        check_model(run, context.model.fingerprint, context.model.label)
        neurons = neurons_from(context.store, run, context.prompts, max(self.ks))
        return dataclasses.replace(self, neurons=neurons)

    @property
    def ranked(self) -> RankedNeurons:
        """The neurons that ``bind`` found."""
        assert self.neurons is not None, "the neurons are found by bind"
        return self.neurons

    def deep(self, shape: ModelShape) -> list[int]:
        """The layers whose other neurons "keep" zeroes; raises UserError for one that does not exist."""
        from mathinterp.models.depth import deep_layers

        return shape.chosen_layers(deep_layers(shape.n_layers) if self.deep_layers is None else self.deep_layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; of the neurons their fingerprint."""
        return {
            "neurons_from": self.neurons_from,
            "neurons": self.ranked.fingerprint,
            "ks": sorted(set(self.ks)),
            "control_seeds": self.control_seeds,
            "deep_layers": None if self.deep_layers is None else list(self.deep_layers),
            "positions": "all",
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, the neurons of every ranking, and one file for each mode, ranking and seed.

        Raises UserError for prompts without neurons and for random draws that a layer has too few neurons for.
        """
        from mathinterp.experiments.mask_keep.ranked import check_room

        self.deep(shape)
        layer_PR, neuron_PR = self._first(prompts)
        assert layer_PR.max() < shape.n_layers, "a ranked neuron of a layer that the model has not"
        assert neuron_PR.max() < shape.n_neurons, "a ranked neuron that the model has not"
        if self.control_seeds:
            check_room(layer_PR, shape.n_neurons, prompts)
        curves = [(mode, ranking, seed) for mode in MODES for ranking, seed in self._rankings()]
        work = [{"mode": mode, "ranking": ranking, "seed": seed} for mode, ranking, seed in curves]
        pieces = [Shard("maskkeep_scan", index, item, float(len(set(self.ks)))) for index, item in enumerate(work)]
        return [Shard("baseline", 0, cost=0.5), Shard("maskkeep_neurons", 0, cost=0.1), *pieces]

    def _first(self, prompts: Sequence[TokenizedPrompt]) -> tuple[np.ndarray, np.ndarray]:
        """layer_PR and neuron_PR, as many places as are asked for."""
        layer_PR, neuron_PR = self.ranked.of(prompts)
        most, places = max(self.ks), neuron_PR.shape[1]
        if places < most:
            raise UserError(f"run {self.neurons_from} ranks {places} neurons of each prompt, k = {most} asked")
        return layer_PR[:, :most], neuron_PR[:, :most]

    def _rankings(self) -> list[tuple[str, int]]:
        return [("top", 0), *(("random", seed) for seed in range(self.control_seeds))]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (k, prompt)."""
        return {"baseline": 1, "maskkeep_scan": len(set(self.ks))}.get(shard.table, 0) * len(prompts)

    def prepare(self, subject: Subject) -> MaskKeepState:
        """The runner of padded passes; the prompts' neurons as arrays."""
        from mathinterp.experiments.mask_keep.rows import prepare

        return prepare(subject, self.deep(subject.anatomy.shape), *self._first(subject.prompts))

    def notes(self, state: MaskKeepState) -> dict[str, Any]:
        """The deep layers, and how far a pass whose masks zero nothing strays from the baseline."""
        from mathinterp.experiments.mask_keep.rows import noise_floor

        return {
            "engine": state.ablation.engine.name,
            "deep_layers": list(state.deep),
            "noise_floor": noise_floor(state),
        }

    def run(self, state: MaskKeepState, shard: Shard) -> pa.Table:
        """Rows of one mode, ranking and seed, or of one of the small tables."""
        from mathinterp.experiments.mask_keep.rows import baseline_rows, neuron_rows, scan_rows

        if shard.table == "baseline":
            return baseline_rows(state)
        if shard.table == "maskkeep_neurons":
            return pa.concat_tables([neuron_rows(state, *which) for which in self._rankings()])
        return scan_rows(state, **shard.work, ks=sorted(set(self.ks)))
