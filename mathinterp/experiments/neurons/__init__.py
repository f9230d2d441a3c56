"""Comparative Neuron Analysis: importance and coefficient of every FFN neuron at END, original against intervened.

method.md section 5. Interventions: heads zeroed at every position; another model (the same one with an adapter, or any
of the same shape and vocabulary); or the counterfactual input. Per prompt the neurons that rank first are kept, by
layer, so that the first of all layers together can be told from the rows; over all prompts there are mean and spread of
every neuron, by operation. Heads, attention and the whole MLP get the same score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.lens.neurons import TARGETS, EndActivations, FrozenScales, Head, NeuronLens, end_activations
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.costs import Cost
from mathinterp.experiments.neurons.rows import Sides, block_rows, change_of, prompt_rows, summaries
from mathinterp.experiments.neurons.tables import NEURON_TARGETS, TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.models.catalog import DTYPES, ModelSpec, load
from mathinterp.prompts.prompt import TokenizedPrompt

AGAINST = ("head", "adapter", "model", "input")
RANKINGS = ("difference", "abs", "ratio")
PROMPTS_A_SHARD = 4096  # their logits are held together; each block multiplies unembedding and values again


@dataclass(frozen=True)
class OtherModel:
    """The model that the original is compared with; ``fingerprint`` is the driver's, ``label`` for people."""

    spec: ModelSpec
    fingerprint: str
    label: str


@dataclass
class NeuronState:
    """What a replica keeps between shards."""

    prompts: Sequence[TokenizedPrompt]
    lens: NeuronLens
    original: EndActivations
    scales: FrozenScales
    target_P: torch.Tensor
    intervened: EndActivations | None
    intervened_lens: NeuronLens  # the original's, unless another model is compared

    def of_prompts(self, first: int, stop: int) -> "NeuronState":
        """The state of some of the prompts."""
        rows = slice(first, stop)
        return replace(
            self,
            prompts=self.prompts[rows],
            original=self.original.rows(rows),
            scales=self.scales.rows(rows),
            target_P=self.target_P[rows],
            intervened=None if self.intervened is None else self.intervened.rows(rows),
        )


@dataclass(frozen=True)
class Neurons(Experiment):
    """Compare every neuron's importance between the original and ``against``.

    against: None (the original alone), "head", "adapter", "model" or "input" (the counterfactual prompt).
    heads: with "head": zeroed together, at every position.
    other: with "adapter" and "model".
    target: the token w: "predicted" by the original model, or "gold", the first scored answer token.
    rank: what puts a neuron among a prompt's first: "difference" (change), "abs" (its size), "ratio" (change /
        |importance in the original|). Without ``against`` its importance takes the change's place.
    top: neurons of a prompt, over all layers, that count as its first; so many are stored of each layer.
    keep_all: store every neuron of every prompt.
    layers: None = all.
    """

    against: str | None = None
    heads: tuple[Head, ...] = ()
    other: OtherModel | None = None
    target: str = "predicted"
    rank: str = "difference"
    top: int = 100
    keep_all: bool = False
    layers: tuple[int, ...] | None = None

    name: ClassVar[str] = "neurons"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        for name, value, known in (
            ("against", self.against, (None, *AGAINST)),
            ("target", self.target, TARGETS),
            ("rank", self.rank, RANKINGS),
        ):
            if value not in known:
                raise UserError(f"--{name} '{value}' is not known; take one of {', '.join(k for k in known if k)}")
        if self.top < 1:
            raise UserError(f"cannot keep {self.top} neurons a prompt; give 1 or more")
        if (self.against == "head") != bool(self.heads):
            raise UserError("name the heads to zero as --against head:17.22,14.19")
        assert (self.against in ("adapter", "model")) == (self.other is not None)

    @property
    def needs_counterfactuals(self) -> bool:
        """The counterfactual input is the intervention."""
        return self.against == "input"

    @property
    def tuned(self) -> bool:
        """Whether the intervened side is another model: then change = tuned - original, else original - intervened."""
        return self.other is not None

    @property
    def models_held(self) -> int:
        """Another model is held beside the original."""
        return 1 if self.other is None else 2

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers looked at; raises UserError for a layer or head that does not exist."""
        for layer, head in self.heads:
            shape.check_head(layer, head)
        layers = list(range(shape.n_layers)) if self.layers is None else sorted(set(self.layers))
        for layer in layers:
            shape.check_layer(layer)
        return layers

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row or how it is read; another model is its fingerprint."""
        detail = ",".join(f"{layer}.{head}" for layer, head in sorted(self.heads))
        detail = self.other.fingerprint if self.other is not None else detail
        return {
            "against": f"{self.against}:{detail}" if detail else self.against,
            "change": "intervened - original" if self.tuned else "original - intervened",
            "target": self.target,
            "rank": self.rank,
            "top": self.top,
            "keep": "all" if self.keep_all else "top",
            "layers": None if self.layers is None else sorted(set(self.layers)),
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One a layer and block of prompts, and the prompts' target tokens."""
        blocks = [(s, min(s + PROMPTS_A_SHARD, len(prompts))) for s in range(0, len(prompts), PROMPTS_A_SHARD)]
        work = [{"layers": [layer], "prompts": list(block)} for block in blocks for layer in self.chosen(shape)]
        pieces = [Shard("neuron_scan", index, part) for index, part in enumerate(work)]
        return [*pieces, Shard("neuron_targets", 0, cost=0.1)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (layer, prompt, condition); the clean passes behind them are few."""
        conditions = 1 if self.against is None else 2
        first, stop = shard.work.get("prompts", (0, 0))
        return len(shard.work.get("layers", [])) * (stop - first) * conditions

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """See cost.py."""
        from mathinterp.experiments.neurons.cost import cost_of

        return cost_of(self, shape, prompts, shards)

    def prepare(self, subject: Subject) -> NeuronState:
        """The passes whose activations at END everything else is made of."""
        anatomy, prompts = subject.anatomy, subject.prompts
        lens = NeuronLens(anatomy)
        sequences = [prompt.input_ids[: prompt.end + 1] for prompt in prompts]
        original = end_activations(anatomy, sequences)
        target_P = lens.targets(prompts, self.target, original)
        intervened, other_lens = None, lens
        if self.against == "head":
            intervened = end_activations(anatomy, sequences, self.heads)
        elif self.against == "input":
            intervened = end_activations(anatomy, [_counterfactual(prompt) for prompt in prompts])
        elif self.other is not None:
            other_lens = NeuronLens(self._load_other(anatomy))
            intervened = end_activations(other_lens.anatomy, sequences)
        return NeuronState(
            prompts, lens, original, lens.frozen_scales(original), target_P, intervened, other_lens
        )  # fmt: skip

    def _load_other(self, anatomy: Anatomy) -> Anatomy:
        assert self.other is not None
        dtype = next(name for name, dtype in DTYPES.items() if dtype == anatomy.dtype)
        loaded = load(replace(self.other.spec, dtype=dtype), anatomy.device)
        if loaded.fingerprint != self.other.fingerprint:
            raise UserError(
                f"model '{self.other.label}' is not the driver's here (fingerprint {loaded.fingerprint}, driver"
                f" {self.other.fingerprint}); all nodes need the same files"
            )
        return loaded.anatomy

    def notes(self, state: NeuronState) -> dict[str, Any]:
        """What the original was compared with, for people."""
        return {"against": self.other.label if self.other is not None else self.parameters()["against"]}

    def run(self, state: NeuronState, shard: Shard) -> pa.Table:
        """Rows of one layer: the prompts' first neurons, heads and blocks, and every neuron's summaries over them."""
        if shard.table == "neuron_targets":
            return _targets(state)
        layer = shard.work["layers"][0]
        state = state.of_prompts(*shard.work["prompts"])
        sides = _sides(state, layer)
        parts = [self._neuron_rows(state, layer, sides), *block_rows(state.prompts, layer, sides)]
        return pa.concat_tables([*parts, *summaries(state.prompts, layer, sides, self.tuned)])

    def _neuron_rows(self, state: NeuronState, layer: int, sides: Sides) -> pa.Table:
        """Per prompt the layer's first neurons (ties: the lower number first), or all in order."""
        prompts, neurons = sides.importance[0].shape
        if self.keep_all:
            chosen_Pk = torch.arange(neurons, device=sides.importance[0].device).expand(prompts, -1)
        else:
            order = torch.sort(self._rank_key(sides), dim=1, descending=True, stable=True).indices
            chosen_Pk = order[:, : self.top]
        values = {
            name: values_PK.gather(1, chosen_Pk).cpu().flatten().numpy() for name, values_PK in sides.columns().items()
        }
        prompt_n = np.repeat(np.arange(prompts), chosen_Pk.shape[1])
        return prompt_rows("neuron", layer, chosen_Pk.cpu().flatten().numpy(), state.prompts, prompt_n, values)

    def _rank_key(self, sides: Sides) -> torch.Tensor:
        """What a prompt's neurons are ranked by, in float32 as stored: the view does the same over all layers."""
        importance_PK = sides.importance[0]
        change_PK = importance_PK if len(sides.importance) == 1 else change_of(sides.importance, self.tuned)
        if self.rank == "abs":
            return change_PK.abs()
        if self.rank == "ratio":
            return torch.where(importance_PK == 0, 0.0, change_PK / importance_PK.abs())
        return change_PK


def _counterfactual(prompt: TokenizedPrompt) -> tuple[int, ...]:
    assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
    return prompt.counterfactual_ids[: prompt.end + 1]


def _sides(state: NeuronState, layer: int) -> Sides:
    """The layer under both conditions; unembedding times values is multiplied once a model, for all prompts."""
    directions_KV = state.lens.directions(layer)
    layers = [state.lens.layer(layer, state.original, state.scales, state.target_P, directions_KV)]
    coefficients = [state.original.coefficients_PK[layer]]
    if state.intervened is not None:
        if state.intervened_lens is not state.lens:
            del directions_KV  # two at once might not fit
            directions_KV = state.intervened_lens.directions(layer)
        layers.append(state.intervened_lens.layer(layer, state.intervened, state.scales, state.target_P, directions_KV))
        coefficients.append(state.intervened.coefficients_PK[layer])
    return Sides(layers, [side.neurons_PK.float() for side in layers], [values.float() for values in coefficients])


def _targets(state: NeuronState) -> pa.Table:
    """The token w of each prompt, and what the two sides say at END."""
    parts = []
    for condition, lens, activations in (
        ("original", state.lens, state.original),
        ("intervened", state.intervened_lens, state.intervened),
    ):
        if activations is None:
            continue
        logits_PV = lens.logits(activations)
        predicted = logits_PV.argmax(dim=-1).cpu().numpy()
        logprob = logits_PV.log_softmax(dim=-1).gather(1, state.target_P[:, None])[:, 0]
        gold = np.array([prompt.scored[0].token_id for prompt in state.prompts])
        columns = {
            "prompt_id": [prompt.prompt.prompt_id for prompt in state.prompts],
            "condition": [condition] * len(state.prompts),
            "target_id": state.target_P.cpu().numpy(),
            "logprob": logprob.float().cpu().numpy(),
            "predicted_id": predicted,
            "correct": predicted == gold,
        }
        arrays = [pa.array(columns[column.name]).cast(column.type) for column in NEURON_TARGETS]
        parts.append(pa.Table.from_arrays(arrays, schema=NEURON_TARGETS))
    return pa.concat_tables(parts)
