"""Concept scan: shallow neurons that become numbers and operations when attention moves them (paper A, section 4.4).

Every FFN neuron of the chosen layers through every chosen attention layer's value-output matrix, to the vocabulary:
how many concepts are among the first ``top`` tokens (method.md section 5; forward/concepts.py). The weights alone are
read; prompts change nothing. Each value vector is also read directly, with no attention between. So are random
directions, as many as a layer has neurons: what attention makes of anything is no finding about neurons. One row per
(vector, attention layer, sign); the best attention layer of each neuron and the levels are SQL over them.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.lens.concepts import (
    NO_CONCEPT,
    ConceptReader,
    FirstTokens,
    found_concepts,
)
from mathinterp.engine.lens.lens import wide_dtype, written_values
from mathinterp.engine.side_by_side import SideBySide
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.concepts.tables import CONCEPT_SCAN, TABLES
from mathinterp.experiments.concepts.words import ConceptList, read_concepts, token_texts
from mathinterp.experiments.json_lists import in_lists, json_lists
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

PAPER_TOP, PAPER_VOCABULARY = 50, 32_000
FEWEST_TOP = 5
CROWDED = 8  # a top of more than an eighth of the vocabulary is warned of
INTO = ("later", "all")
SIGNS = {"plus": (1,), "both": (1, -1)}
COUNTS = ("distinct", "tokens")
LAYERS_A_FILE = 4
SHOWN_TOKENS = 10
RANDOM_SEED = 0

logger = logging.getLogger(__name__)


def default_top(vocabulary: int) -> int:
    """The paper's 50, but of a small vocabulary only the paper's share (50 of 32,000), and 5 at least."""
    return min(PAPER_TOP, max(FEWEST_TOP, vocabulary * PAPER_TOP // PAPER_VOCABULARY))


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens spell which concepts, and how tokens are shown."""

    names: list[str]  # of the concepts, as JSON
    concept_V: torch.Tensor  # number of each token's concept, NO_CONCEPT where it has none
    shown: list[str]  # the tokens' texts, white space kept, as JSON

    @property
    def tokens(self) -> int:
        """Tokens that spell a concept."""
        return int((self.concept_V != NO_CONCEPT).sum())

    @property
    def concepts(self) -> int:
        """Concepts that some token spells."""
        return len(self.concept_V.unique()) - int(self.tokens < len(self.concept_V))

    @cached_property
    def names_in_lists(self) -> pa.Array:
        """``names`` as ``json_lists`` takes them."""
        return in_lists(self.names)

    @cached_property
    def shown_in_lists(self) -> pa.Array:
        """``shown`` as ``json_lists`` takes them."""
        return in_lists(self.shown)


def match_vocabulary(concepts: ConceptList, tokenizer: Any, vocabulary: int) -> Vocabulary:
    """Find the concepts among a model's tokens; raises UserError if none of them is a token."""
    texts = token_texts(tokenizer, vocabulary)
    numbers = [NO_CONCEPT if number is None else number for number in concepts.numbers(texts)]
    named = tokenizer.convert_ids_to_tokens(list(range(min(vocabulary, len(tokenizer)))))
    pieces = [*named, *(f"<{number}>" for number in range(len(named), vocabulary))]  # rows beyond the tokenizer's
    shown = [piece if text is None else text for text, piece in zip(texts, pieces, strict=True)]
    found = Vocabulary(_as_json(concepts.names), torch.tensor(numbers), _as_json(shown))
    if not found.tokens:
        raise UserError(
            f"none of the {len(concepts.concepts)} concepts of '{concepts.label}' is a token of the model; give others"
            " with --concepts FILE"
        )
    return found


@dataclass
class ConceptState:
    """What a replica keeps between shards: the random directions, and the reader of the attention layer it is at."""

    anatomy: Anatomy
    vocabulary: Vocabulary
    top: int
    random_KD: Future[torch.Tensor]
    workers: SideBySide
    reader: tuple[int | None, ConceptReader] | None = None

    def reader_of(self, attention_layer: int | None) -> ConceptReader:
        """The reader of vectors through an attention layer; the one asked for last is kept."""
        if self.reader is None or self.reader[0] != attention_layer:
            self.reader = None  # its memory first
            reader = ConceptReader(self.anatomy, self.vocabulary.concept_V, self.top, attention_layer)
            self.reader = attention_layer, reader
        return self.reader[1]

    def vectors(self, layer: int | None) -> torch.Tensor:
        """What each neuron of the layer writes at coefficient 1, or (None) the random directions: K D.

        In the model's dtype where that says all, else in the wide one.
        """
        if layer is None:
            return self.random_KD.result()
        if self.anatomy.mlp_post_norm(layer) is None:
            return self.anatomy.value_vectors(layer).detach()
        return written_values(self.anatomy, layer)


@dataclass(frozen=True)
class Concepts(Experiment):
    """Read every neuron of ``layers`` through every layer of ``attention_layers``.

    concepts: what is looked for; None = the default list.
    top: tokens that count as first; see default_top for small vocabularies.
    layers: of the neurons; None = the lower half (0..15 of 32).
    attention_layers: None = the lower half and one more (0..16 of 32).
    into: "later", attention layers above the neuron's own (only they read what it writes), or "all".
    sign: "plus", a neuron's value as it is, or "both", also its negative (what a negative coefficient writes).
    count: "distinct" concepts, or all "tokens" that spell one.
    """

    concepts: ConceptList | None = None
    top: int = PAPER_TOP
    layers: tuple[int, ...] | None = None
    attention_layers: tuple[int, ...] | None = None
    into: str = "later"
    sign: str = "plus"
    count: str = "distinct"

    name: ClassVar[str] = "concepts"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        for name, value, known in (
            ("into", self.into, INTO),
            ("sign", self.sign, tuple(SIGNS)),
            ("count", self.count, COUNTS),
        ):
            if value not in known:
                raise UserError(f"--{name} '{value}' is not known; take one of {', '.join(known)}")
        if self.top < 1:
            raise UserError(f"cannot look at the first {self.top} tokens; give 1 or more")

    @property
    def looked_for(self) -> ConceptList:
        """The concepts, the default resolved."""
        return read_concepts() if self.concepts is None else self.concepts

    def chosen(self, shape: ModelShape) -> tuple[list[int], list[int]]:
        """Neuron layers and attention layers; raises UserError for one that does not exist, or if none meet."""
        half = max(1, shape.n_layers // 2)
        neurons = list(range(half)) if self.layers is None else sorted(set(self.layers))
        default = range(min(half + 1, shape.n_layers))
        attention = list(default) if self.attention_layers is None else sorted(set(self.attention_layers))
        for layer in (*neurons, *attention):
            shape.check_layer(layer)
        if not any(self._reads(a, layer) for a in attention for layer in neurons):
            raise UserError(
                f"no attention layer up to {max(attention)} comes after neuron layer {min(neurons)}: choose later"
                " --attention-layers, or --into all"
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
            "layers": None if self.layers is None else sorted(set(self.layers)),
            "attention_layers": None if self.attention_layers is None else sorted(set(self.attention_layers)),
            "into": self.into,
            "sign": self.sign,
            "count": self.count,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One attention layer (null: read directly) and up to four neuron layers a file; null is random directions."""
        if self.top >= shape.vocabulary:
            raise UserError(
                f"the first {self.top} of a vocabulary of {shape.vocabulary} tokens hold every concept: choose a"
                f" smaller --top, for example {default_top(shape.vocabulary)}"
            )
        if CROWDED * self.top > shape.vocabulary:
            logger.warning(
                "the first %d of %d tokens: many concepts are there by chance (see expected_hits in the run's notes)",
                self.top, shape.vocabulary,
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
        assert subject.tokenizer is not None, "concepts are matched with the tokenizer's tokens"
        anatomy = subject.anatomy
        aside = ThreadPoolExecutor(1)
        random_KD = aside.submit(_random_directions, anatomy)
        aside.shutdown(wait=False)  # drawn while tokens are matched and the first shards are read
        vocabulary = match_vocabulary(self.looked_for, subject.tokenizer, anatomy.shape.vocabulary)
        return ConceptState(anatomy, vocabulary, self.top, random_KD, SideBySide(anatomy.device))

    def notes(self, state: ConceptState) -> dict[str, Any]:
        """Concepts and tokens that spell them; how many of the first tokens would be such in a random order."""
        tokens, vocabulary = state.vocabulary.tokens, len(state.vocabulary.concept_V)
        return {
            "concepts_in_vocabulary": state.vocabulary.concepts,
            "concept_tokens": tokens,
            "expected_hits": self.top * tokens / vocabulary,
        }

    def run(self, state: ConceptState, shard: Shard) -> pa.Table:
        """Rows of the shard's neuron layers through its attention layer."""
        attention_layer = shard.work["attention_layer"]
        try:
            reader = state.reader_of(attention_layer)
        except FloatingPointError as error:
            raise FloatingPointError(f"attention layer {attention_layer}: {error}") from error

        def rows(vectors: tuple[int | None, int]) -> pa.Table:
            layer, sign = vectors
            values_KD = state.vectors(layer) if sign == 1 else -state.vectors(layer)
            try:
                found = reader.read(values_KD, every=attention_layer is None)
            except FloatingPointError as error:
                raise FloatingPointError(f"layer {layer}, attention layer {attention_layer}: {error}") from error
            place = {"layer": layer, "attention_layer": attention_layer, "sign": sign}
            return self._rows(state.vocabulary, place, len(values_KD), found)

        return pa.concat_tables(
            state.workers.map(rows, [(layer, sign) for layer in shard.work["layers"] for sign in SIGNS[self.sign]])
        )

    def _rows(self, vocabulary: Vocabulary, place: dict[str, int | None], neurons: int, found: FirstTokens) -> pa.Table:
        """One row for each of the neurons: those that were not found have no hits and no texts."""
        row_M, number_M, first_M = found_concepts(found.ids_RT, vocabulary.concept_V)
        named_R = row_M[first_M].bincount(minlength=len(found.rows_R))
        hits_R = named_R if self.count == "distinct" else row_M.bincount(minlength=len(found.rows_R))
        shown_RS = found.ids_RT[:, :SHOWN_TOKENS]
        shown_R = torch.full_like(found.rows_R, shown_RS.shape[1])
        columns: dict[str, pa.Array] = {
            "neuron": np.arange(neurons),
            "hits": _at_rows(hits_R, found, neurons),
            "concepts": json_lists(vocabulary.names_in_lists, number_M[first_M], _at_rows(named_R, found, neurons)),
            "tokens": json_lists(vocabulary.shown_in_lists, shown_RS.flatten(), _at_rows(shown_R, found, neurons)),
        }
        schema = CONCEPT_SCAN
        columns |= {
            name: pa.repeat(pa.scalar(value, schema.field(name).type), neurons) for name, value in place.items()
        }
        return pa.Table.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in schema], schema=schema)


def _random_directions(anatomy: Anatomy) -> torch.Tensor:
    """As many standard normal vectors as a layer has neurons, always the same ones: K D."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    vectors_KD = torch.randn(anatomy.shape.n_neurons, anatomy.shape.d_model, generator=generator)
    return vectors_KD.to(anatomy.device, wide_dtype(anatomy.dtype))


def _at_rows(values_R: torch.Tensor, found: FirstTokens, neurons: int) -> np.ndarray:
    """The values at the neurons that were found, 0 at the others."""
    values_N = np.zeros(neurons, np.int32)
    values_N[found.rows_R.numpy()] = values_R.numpy()
    return values_N


def _as_json(texts: Sequence[str]) -> list[str]:
    return [json.dumps(text, ensure_ascii=False) for text in texts]
