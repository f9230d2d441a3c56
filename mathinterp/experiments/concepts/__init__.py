"""Concept scan: shallow neurons that become numbers and operations when attention moves them (paper A, section 4.4).

Every FFN neuron of the chosen layers through every chosen attention layer's value-output matrix, to the vocabulary:
how many concepts are among the first ``top`` tokens (method.md section 5; engine/lens/concepts.py). The weights alone
are read; prompts change nothing. Each value vector is also read directly, with no attention between. So are random
directions, as many as a layer has neurons: what attention makes of anything is no finding about neurons. One row per
(vector, attention layer, sign); the best attention layer of each neuron and the levels are SQL over them. What follows
is the zeroing of the neurons that are kept at each level (see concept_zeroing).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.ablation import SCORINGS
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.concepts.tables import TABLES
from mathinterp.experiments.concepts.words import ConceptList, read_concepts
from mathinterp.experiments.options import check_options, normalized, option, read_counts, read_layers
from mathinterp.experiments.results import Results
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_DRAWS

if TYPE_CHECKING:
    from mathinterp.experiments.concept_zeroing import ConceptZeroing
    from mathinterp.experiments.concepts.rows import ConceptState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

PAPER_TOP, PAPER_VOCABULARY = 50, 32_000
FEWEST_TOP = 5
CROWDED = 8  # a top of more than an eighth of the vocabulary is warned of
INTO = ("later", "all")
SIGNS = {"plus": (1,), "both": (1, -1)}
COUNTS = ("distinct", "tokens")
LAYERS_A_FILE = 4

logger = logging.getLogger(__name__)


def default_top(vocabulary: int) -> int:
    """The paper's 50, but of a small vocabulary only the paper's share (50 of 32,000), and 5 at least."""
    return min(PAPER_TOP, max(FEWEST_TOP, vocabulary * PAPER_TOP // PAPER_VOCABULARY))


read_levels = partial(read_counts, field="levels")
read_attention_layers = partial(read_layers, field="attention_layers")


@dataclass(frozen=True)
class ConceptOptions:
    """What is shown of a concept scan, and zeroed after it."""

    levels: tuple[int, ...] = option((0, 1, 2, 3), "A neuron is kept at level M if hits > M.", parse=read_levels,
                                     shown="0,1,2,3")  # fmt: skip
    zero: bool = option(True, "Zero each level's neurons on the prompts.")
    control_seeds: int = option(
        3, "Random sets with as many neurons in each layer, per level.", least=0, most=MOST_DRAWS
    )
    scoring: str = option("token", "What counts as right when neurons are zeroed.", choices=SCORINGS)
    show: int = option(8, "Neurons shown.", least=1)

    def __post_init__(self) -> None:
        normalized(self, levels=tuple(sorted(set(read_levels(self.levels) or ()))))
        check_options(self)
        if not self.levels:
            raise UserError("no `levels` to keep neurons at; name at least one")


@dataclass(frozen=True)
class Concepts(Experiment):
    """Neurons that become numbers and operations when attention moves them (paper A, section 4.4).

    Every neuron's value goes through every attention layer's value-output matrix (all heads at weight 1) to the
    vocabulary; hits are the concepts among the first tokens, through the best attention layer. Then all neurons with
    hits > M are zeroed at once, against random ones. A concept file is a JSON object: category -> list of concepts,
    each a spelling or a list of spellings that count as one; spellings in small letters are found in any case.
    """

    concepts: ConceptList | None = option(
        None, "JSON: category -> list of concepts.", parse=read_concepts, metavar="FILE", shown="a list of the package"
    )
    top: int | None = option(
        None, "Tokens that count as first.", least=1, shown="50 (5 to 50 below a vocabulary of 32,000)"
    )
    layers: tuple[int, ...] | None = option(
        None, "Layers of the neurons.", parse=read_layers, shown="the lower half (0-15 of 32)"
    )
    attention_layers: tuple[int, ...] | None = option(
        None, "Attention layers.", parse=read_attention_layers, shown="the lower half and one more (0-16 of 32)"
    )
    into: str = option("later", "Attention layers above the neuron's own, which alone read what it writes; or all.",
                       choices=INTO)  # fmt: skip
    sign: str = option("plus", "A neuron's value as it is; or also its negative, which a negative coefficient writes.",
                       choices=tuple(SIGNS))  # fmt: skip
    count: str = option("distinct", "Distinct concepts; or all tokens that spell one.", choices=COUNTS)

    name: ClassVar[str] = "concepts"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    show_options: ClassVar[type] = ConceptOptions
    prompts_needed: ClassVar[int] = 1  # the weights alone are read: another limit does not read them again
    follow_up_key: ClassVar[str] = "zeroing"
    command_examples: ClassVar[Sequence[str]] = (
        "scan concepts --limit 200",
        "scan concepts --model smollm2 --adapter smollm2-arithmetic --layers 0-3 --attention-layers 0-4",
        "scan concepts --concepts my_concepts.json --top 10 --sign both --no-zero",
    )

    def __post_init__(self) -> None:
        if isinstance(self.concepts, str | Path):
            normalized(self, concepts=read_concepts(self.concepts))
        normalized(self, layers=read_layers(self.layers), attention_layers=read_attention_layers(self.attention_layers))
        check_options(self)

    def bind(self, context: Context) -> Self:
        """With ``top`` that suits the model's vocabulary; raises UserError if none of its tokens is a concept."""
        from mathinterp.experiments.concepts.rows import match_vocabulary

        model = context.model
        match_vocabulary(self.looked_for, model.tokenizer, model.shape.vocabulary)
        return replace(self, top=self.first(model.shape))

    @property
    def looked_for(self) -> ConceptList:
        """The concepts, the default resolved."""
        return read_concepts() if self.concepts is None else self.concepts

    def first(self, shape: ModelShape) -> int:
        """How many tokens count as first, the default resolved."""
        return default_top(shape.vocabulary) if self.top is None else self.top

    def chosen(self, shape: ModelShape) -> tuple[list[int], list[int]]:
        """Neuron layers and attention layers; raises UserError for one that does not exist, or if none meet."""
        half = max(1, shape.n_layers // 2)
        neurons = list(range(half)) if self.layers is None else list(self.layers)
        default = range(min(half + 1, shape.n_layers))
        attention = list(default) if self.attention_layers is None else list(self.attention_layers)
        for layer in (*neurons, *attention):
            shape.check_layer(layer)
        if not any(self._reads(a, layer) for a in attention for layer in neurons):
            raise UserError(
                f"no attention layer up to {max(attention)} comes after neuron layer {min(neurons)}: choose later"
                " `attention_layers`, or `into` all"
            )
        return neurons, attention

    def _reads(self, attention_layer: int, layer: int) -> bool:
        return self.into == "all" or attention_layer > layer

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "concepts": self.looked_for.fingerprint,
            "concept_list": self.looked_for.label,
            "top": self.top,
            "layers": None if self.layers is None else list(self.layers),
            "attention_layers": None if self.attention_layers is None else list(self.attention_layers),
            "into": self.into,
            "sign": self.sign,
            "count": self.count,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One attention layer (null: read directly) and up to four neuron layers a file; null is random directions."""
        top = self.first(shape)
        if top >= shape.vocabulary:
            raise UserError(
                f"the first {top} of a vocabulary of {shape.vocabulary} tokens hold every concept: choose a"
                f" smaller `top`, for example {default_top(shape.vocabulary)}"
            )
        if CROWDED * top > shape.vocabulary:
            logger.warning(
                "the first %d of %d tokens: many concepts are there by chance (see expected_hits in the run's notes)",
                top, shape.vocabulary,
            )  # fmt: skip
        neurons, attention = self.chosen(shape)
        pieces: list[Shard] = []
        for attention_layer in (None, *attention):
            reading: list[int | None] = [
                layer for layer in neurons if attention_layer is None or self._reads(attention_layer, layer)
            ]
            reading += [None] if reading else []
            for start in range(0, len(reading), LAYERS_A_FILE):
                layers = reading[start : start + LAYERS_A_FILE]
                work = {"attention_layer": attention_layer, "layers": layers}
                pieces.append(Shard("concept_scan", len(pieces), work, cost=float(len(layers))))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """None: no forward pass is made."""
        return 0

    @property
    def reads_together(self) -> bool:
        """Weights alone are read."""
        return False

    def prepare(self, subject: Subject) -> ConceptState:
        """Match the concepts with the model's tokens."""
        from mathinterp.experiments.concepts.rows import prepare

        top = self.first(subject.anatomy.shape)
        return prepare(subject, self.looked_for, top, SIGNS[self.sign], self.count == "distinct")

    def notes(self, state: ConceptState) -> dict[str, Any]:
        """Concepts and tokens that spell them; how many of the first tokens would be such in a random order."""
        from mathinterp.experiments.concepts.rows import notes

        return notes(state, len(self.looked_for.concepts))

    def run(self, state: ConceptState, shard: Shard) -> pa.Table:
        """Rows of the shard's neuron layers through its attention layer."""
        from mathinterp.experiments.concepts.rows import shard_rows

        return shard_rows(state, shard)

    def follow_up(self, results: Results, shown: ConceptOptions) -> ConceptZeroing | None:
        """The zeroing of each level's neurons; None if it is not asked for, or no level keeps any."""
        from mathinterp.experiments.concept_zeroing import ConceptZeroing, NeuronSet
        from mathinterp.experiments.concepts.summary import kept_neurons

        kept = kept_neurons(results, shown.levels) if shown.zero else {}
        sets = tuple(NeuronSet(*item) for item in kept.items())
        return ConceptZeroing(sets, results.run_id, shown.control_seeds, shown.scoring) if sets else None
