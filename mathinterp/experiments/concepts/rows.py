"""How a concept scan's rows are computed: vectors through an attention layer to the vocabulary.

Shape legend: K neurons or directions of a layer, R those of them that are found, T their first tokens, M concepts among
these, D model width, V vocabulary.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.lens.concepts import NO_CONCEPT, ConceptReader, FirstTokens, found_concepts
from mathinterp.engine.lens.lens import wide_dtype, written_values
from mathinterp.engine.side_by_side import SideBySide
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.experiments.concepts.tables import CONCEPT_SCAN
from mathinterp.experiments.concepts.words import ConceptList, token_texts
from mathinterp.experiments.json_lists import in_lists, json_lists
from mathinterp.models.anatomy import Anatomy

SHOWN_TOKENS = 10
RANDOM_SEED = 0


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
            " with `concepts`"
        )
    return found


@dataclass
class ConceptState:
    """What a replica keeps between shards: the random directions, and the reader of the attention layer it is at."""

    anatomy: Anatomy
    vocabulary: Vocabulary
    top: int
    signs: tuple[int, ...]
    distinct: bool
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


def prepare(subject: Subject, concepts: ConceptList, top: int, signs: tuple[int, ...], distinct: bool) -> ConceptState:
    """Match the concepts with the model's tokens.

    Args:
        signs: 1 for a value as it is, -1 for its negative.
        distinct: whether hits are distinct concepts, or all tokens that spell one.
    """
    assert subject.tokenizer is not None, "concepts are matched with the tokenizer's tokens"
    anatomy = subject.anatomy
    aside = ThreadPoolExecutor(1)
    random_KD = aside.submit(_random_directions, anatomy)
    aside.shutdown(wait=False)  # drawn while tokens are matched and the first shards are read
    vocabulary = match_vocabulary(concepts, subject.tokenizer, anatomy.shape.vocabulary)
    return ConceptState(anatomy, vocabulary, top, signs, distinct, random_KD, SideBySide(anatomy.device))


def notes(state: ConceptState, listed: int) -> dict[str, Any]:
    """Concepts and tokens that spell them; how many of the first tokens would be such in a random order."""
    tokens, vocabulary = state.vocabulary.tokens, len(state.vocabulary.concept_V)
    return {
        "concepts_in_list": listed,
        "concepts_in_vocabulary": state.vocabulary.concepts,
        "concept_tokens": tokens,
        "expected_hits": state.top * tokens / vocabulary,
    }


def shard_rows(state: ConceptState, shard: Shard) -> pa.Table:
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
        return _rows(state, place, len(values_KD), found)

    return pa.concat_tables(
        state.workers.map(rows, [(layer, sign) for layer in shard.work["layers"] for sign in state.signs])
    )


def _rows(state: ConceptState, place: dict[str, int | None], neurons: int, found: FirstTokens) -> pa.Table:
    """One row for each of the neurons: those that were not found have no hits and no texts."""
    vocabulary = state.vocabulary
    row_M, number_M, first_M = found_concepts(found.ids_RT, vocabulary.concept_V)
    named_R = row_M[first_M].bincount(minlength=len(found.rows_R))
    hits_R = named_R if state.distinct else row_M.bincount(minlength=len(found.rows_R))
    shown_RS = found.ids_RT[:, :SHOWN_TOKENS]
    shown_R = torch.full_like(found.rows_R, shown_RS.shape[1])
    columns: dict[str, pa.Array] = {
        "neuron": np.arange(neurons),
        "hits": _at_rows(hits_R, found, neurons),
        "concepts": json_lists(vocabulary.names_in_lists, number_M[first_M], _at_rows(named_R, found, neurons)),
        "tokens": json_lists(vocabulary.shown_in_lists, shown_RS.flatten(), _at_rows(shown_R, found, neurons)),
    }
    types = {field.name: field.type for field in CONCEPT_SCAN}
    columns |= {name: pa.repeat(pa.scalar(value, types[name]), neurons) for name, value in place.items()}
    return cast_table(CONCEPT_SCAN, columns)


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
