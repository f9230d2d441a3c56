"""Neurons through attention to the vocabulary: against the model's own modules and sorting in float64; the scan."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from mathinterp.engine.layers import recorded
from mathinterp.engine.lens import concepts
from mathinterp.engine.lens.concepts import (
    NO_CONCEPT,
    ConceptReader,
    concept_hits,
    found_concepts,
    top_ids,
    value_output_matrix,
)
from mathinterp.engine.lens.lens import written_values
from mathinterp.errors import UserError
from mathinterp.experiments import concepts as scan_of_concepts
from mathinterp.experiments.base import Subject
from mathinterp.experiments.concepts import Concepts, default_top
from mathinterp.experiments.concepts import rows as rows_of_concepts
from mathinterp.experiments.concepts.rows import match_vocabulary
from mathinterp.experiments.concepts.words import ConceptList, read_concepts
from mathinterp.models.anatomy import Anatomy
from tests.neuron_twin import gain
from tests.tiny import VOCABULARY, of_neurons, tiny_model, tiny_tokenizer

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


# ---- the plain twin: one neuron at a time, one head at a time, from the family's own modules ----


def centred_gain(anatomy: Anatomy, norm: torch.nn.Module, vector_D: torch.Tensor) -> torch.Tensor:
    """A norm's output times its scale, without its bias."""
    if isinstance(norm, torch.nn.LayerNorm):
        return (vector_D - vector_D.mean()) * norm.weight
    return vector_D * gain(anatomy, norm)


def moved_by_attention(anatomy: Anatomy, layer: int, attention_layer: int, neuron: int) -> torch.Tensor:
    shape, size = anatomy.shape, anatomy.shape.d_head
    vector_D = anatomy.value_vectors(layer)[neuron]
    if (post := anatomy.mlp_post_norm(layer)) is not None:
        vector_D = centred_gain(anatomy, post, vector_D)
    read_D = centred_gain(anatomy, anatomy.attention_norm(attention_layer), vector_D)
    written_D = torch.zeros_like(read_D)
    for head in range(shape.n_heads):
        group = head // (shape.n_heads // shape.n_groups)
        value_ZD = anatomy.value(attention_layer).weight[group * size : (group + 1) * size]
        written_D = written_D + (value_ZD @ read_D) @ anatomy.output_weight(attention_layer)[anatomy.head_slice(head)]
    if (post := anatomy.attention_post_norm(attention_layer)) is not None:
        written_D = centred_gain(anatomy, post, written_D)
    return written_D


def first_tokens(anatomy: Anatomy, vector_D: torch.Tensor, top: int) -> list[int]:
    logits_V = (anatomy.unembedding.weight @ centred_gain(anatomy, anatomy.final_norm, vector_D)).tolist()
    return sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))[:top]


# ---- the value-output matrix ----


def test_the_matrix_is_attention_at_a_single_token(anatomy: Anatomy) -> None:
    """There every head's weight is 1: the attention module itself, biases taken off, is the matrix."""
    modules = [anatomy.attention(layer) for layer in range(3)]
    with recorded(modules) as calls:
        anatomy.decoder(input_ids=torch.tensor([[5]]), use_cache=False)
    torch.manual_seed(0)
    rows_ND = torch.randn(4, 32, dtype=torch.float64)
    for layer, call in enumerate(calls):
        norm, post = anatomy.attention_norm(layer), anatomy.attention_post_norm(layer)
        zero = call(modules[layer], torch.zeros(1, 1, 32, dtype=torch.float64))
        for row_D in rows_ND:
            read = centred_gain(anatomy, norm, row_D)
            written_D = (call(modules[layer], read[None, None]) - zero)[0, 0]
            expected = written_D if post is None else centred_gain(anatomy, post, written_D)
            torch.testing.assert_close(row_D @ value_output_matrix(anatomy, layer), expected, **EXACT)


def test_the_twins_norms_are_the_models(anatomy: Anatomy) -> None:
    """Scale and bias apart, centred_gain is what each norm does: the direction is the same."""
    torch.manual_seed(1)
    row_D = torch.randn(32, dtype=torch.float64)
    norms = [anatomy.final_norm, anatomy.attention_norm(1), anatomy.attention_post_norm(1), anatomy.mlp_post_norm(1)]
    for norm in filter(None, norms):
        moved_D = norm(row_D) - (0 if getattr(norm, "bias", None) is None else norm.bias)
        torch.testing.assert_close(
            torch.nn.functional.cosine_similarity(moved_D, centred_gain(anatomy, norm, row_D), dim=0),
            torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=1e-6,  # RMS norms sum in float32
        )  # fmt: skip


@of_neurons
def test_vectors_and_hits_against_one_neuron_at_a_time(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups of 3 tokens, so that some vectors are put aside without a closer look, and a rest that fills none."""
    monkeypatch.setattr(concepts, "GROUP", 3)
    torch.manual_seed(2)
    concept_V = torch.where(torch.rand(VOCABULARY) < 0.1, torch.randint(0, 6, (VOCABULARY,)), NO_CONCEPT)
    concept_V[7] = 3
    reader, top = ConceptReader(anatomy, concept_V, 9), 9
    reader._at_once = 7  # several blocks
    looked_at, closer_look = [], concepts.top_ids
    monkeypatch.setattr(concepts, "top_ids", lambda rows, top: looked_at.append(len(rows)) or closer_look(rows, top))
    seen = 0
    for layer, attention_layer in ((0, 1), (0, 2), (1, 2), (2, 0)):
        vectors_KD = written_values(anatomy, layer) @ value_output_matrix(anatomy, attention_layer)
        found = reader.read(vectors_KD)
        ids = dict(zip(found.rows_R.tolist(), found.ids_RT.tolist(), strict=True))
        counts = dict(zip(found.rows_R.tolist(), concept_hits(found.ids_RT, concept_V, True).tolist(), strict=True))
        tokens = dict(zip(found.rows_R.tolist(), concept_hits(found.ids_RT, concept_V, False).tolist(), strict=True))
        for neuron in range(anatomy.shape.n_neurons):
            vector_D = moved_by_attention(anatomy, layer, attention_layer, neuron)
            torch.testing.assert_close(vectors_KD[neuron], vector_D, **EXACT)
            expected = first_tokens(anatomy, vector_D, top)
            numbers = [int(concept_V[token]) for token in expected if concept_V[token] != NO_CONCEPT]
            assert (neuron in ids) == bool(numbers)
            if numbers:
                assert ids[neuron] == expected
                assert counts[neuron] == len(set(numbers))
                assert tokens[neuron] == len(numbers)
                seen += 1
    assert 0 < seen <= sum(looked_at) < 4 * anatomy.shape.n_neurons, "all or none were found: the test shows nothing"


@of_neurons
def test_a_reader_of_an_attention_layer_multiplies_by_its_matrix(anatomy: Anatomy) -> None:
    concept_V = torch.full((VOCABULARY,), NO_CONCEPT)
    concept_V[::9] = 4
    for layer, attention_layer in ((0, 1), (2, 0)):
        values_KD = written_values(anatomy, layer)
        expected = ConceptReader(anatomy, concept_V, 9).read(values_KD @ value_output_matrix(anatomy, attention_layer))
        found = ConceptReader(anatomy, concept_V, 9, attention_layer).read(values_KD)
        assert torch.equal(found.rows_R, expected.rows_R)
        assert torch.equal(found.ids_RT, expected.ids_RT)


def test_hits_by_hand_also_of_more_concepts_than_tokens() -> None:
    """Numbers of concepts may be larger than the vocabulary."""
    concept_V = torch.tensor([NO_CONCEPT, 900, 901, 900, 0, 31, NO_CONCEPT])
    ids_RT = torch.tensor([[1, 2, 3, 0], [0, 6, 0, 6], [4, 5, 4, 4], [3, 1, 3, 1], [2, 1, 3, 2]])
    assert concept_hits(ids_RT, concept_V, distinct=False).tolist() == [3, 0, 4, 4, 4]
    assert concept_hits(ids_RT, concept_V, distinct=True).tolist() == [2, 0, 2, 1, 2]
    rows_M, numbers_M, first_M = found_concepts(ids_RT, concept_V)
    first = list(zip(rows_M[first_M].tolist(), numbers_M[first_M].tolist(), strict=True))
    assert first == [(0, 900), (0, 901), (2, 0), (2, 31), (3, 900), (4, 901), (4, 900)]
    none = torch.full((7,), NO_CONCEPT)
    assert concept_hits(ids_RT, none, distinct=True).tolist() == [0] * 5


CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_bf16_model_reads_as_its_weights_in_float64(family: str, device: str) -> None:
    """Products are summed in float32 and W_U is used as it is stored: no first token changes place."""
    model = tiny_model(family, dtype=torch.bfloat16)
    exact = tiny_model(family)
    exact.load_state_dict(model.state_dict())
    concept_V = torch.full((VOCABULARY,), NO_CONCEPT)
    concept_V[::7] = torch.arange(len(concept_V[::7]))
    found = [
        ConceptReader(part, concept_V, 9).read(written_values(part, 0) @ value_output_matrix(part, 1))
        for part in (Anatomy(model.to(device)), Anatomy(exact))
    ]
    assert torch.equal(found[0].rows_R, found[1].rows_R)
    assert (found[0].ids_RT == found[1].ids_RT).float().mean() > (0.999 if device == "cpu" else 0.99)
    behind = ConceptReader(Anatomy(model), concept_V, 9, 1).read(written_values(Anatomy(model), 0))
    assert torch.equal(behind.rows_R, found[1].rows_R)
    assert (behind.ids_RT == found[1].ids_RT).float().mean() > (0.999 if device == "cpu" else 0.99)


def test_ties_go_by_token_id() -> None:
    logits_RV = torch.tensor([[1.0, 3, 2, 3, 2, 2, 0], [7, 6, 5, 4, 3, 2, 1], [1, 1, 1, 1, 1, 1, 1]])
    assert top_ids(logits_RV, 4).tolist() == [[1, 3, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3]]
    torch.manual_seed(0)
    crowded = torch.randint(0, 5, (50, 40)).double()
    for row, ids in zip(crowded.tolist(), top_ids(crowded, 11).tolist(), strict=True):
        assert ids == sorted(range(40), key=lambda token: (-row[token], token))[:11]


def test_a_concept_that_ties_at_the_border_counts_by_its_id() -> None:
    """Two equal rows of the unembedding: only the lower id of the two is among the first."""
    model = tiny_model("llama")
    anatomy = Anatomy(model)
    vector_D = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = first_tokens(anatomy, vector_D, VOCABULARY)
    low, high = sorted((order[4], order[100]))
    with torch.no_grad():
        model.lm_head.weight[order[100]] = model.lm_head.weight[order[4]]
    for concept, is_in in ((low, True), (high, False)):
        concept_V = torch.full((VOCABULARY,), NO_CONCEPT)
        concept_V[concept] = 0
        found = ConceptReader(anatomy, concept_V, 5).read(vector_D[None])
        assert found.rows_R.tolist() == ([0] if is_in else [])


def test_out_of_memory_halves_the_block_and_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    concept_V = torch.arange(VOCABULARY)
    reader = ConceptReader(anatomy, concept_V, 5)
    vectors = written_values(anatomy, 0)
    expected = reader.read(vectors)
    read, sizes = reader._read_block, []

    def full(block: torch.Tensor, every: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if len(block) > 12:
            raise torch.cuda.OutOfMemoryError
        sizes.append(len(block))
        return read(block, every)

    monkeypatch.setattr(reader, "_read_block", full)
    reader._at_once = 40
    found = reader.read(vectors)
    assert torch.equal(found.ids_RT, expected.ids_RT)
    assert torch.equal(found.rows_R, expected.rows_R)
    assert sizes == [10, 10, 10, 10]
    broken = vectors.clone()
    broken[3, 5] = torch.nan
    with pytest.raises(FloatingPointError, match="vector 3 is NaN"):
        reader.read(broken)


# ---- the scan ----

NUMBERS = ConceptList("numbers", (*((digit,) for digit in "0123456789"), ("two", "twelve"), ("three",), ("plus", "+")))


def scan_rows(scan: Concepts, anatomy: Anatomy, first: int = 0) -> list[dict[str, Any]]:
    """Of all shards from the ``first`` on."""
    state = scan.prepare(Subject(anatomy, (), tokenizer=tiny_tokenizer()))
    rows: list[dict[str, Any]] = []
    for shard in scan.shards(anatomy.shape, ())[first:]:
        table = scan.run(state, shard)
        assert table.schema == scan.tables[shard.table].schema
        rows += table.to_pylist()
    assert scan.notes(state)["expected_hits"] == pytest.approx(scan.top * 15 / VOCABULARY)
    return rows


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_scan_rows_by_hand(family: str) -> None:
    """Both signs and all tokens; and, from the same first tokens, what the other options store."""
    anatomy, tokenizer = Anatomy(tiny_model(family)), tiny_tokenizer()
    concept_V = match_vocabulary(NUMBERS, tokenizer, VOCABULARY).concept_V
    rows = scan_rows(Concepts(NUMBERS, 11, (0, 1), None, "all", "both", "tokens"), anatomy)
    found = {(r["layer"], r["neuron"], r["attention_layer"], r["sign"]): r for r in rows}
    assert len(found) == len(rows) == 3 * 40 * 3 * 2  # two layers and random directions; read directly, layers 0 and 1
    for layer in (0, 1):
        for neuron in range(40):
            direct_D = anatomy.value_vectors(layer)[neuron]
            if (post := anatomy.mlp_post_norm(layer)) is not None:
                direct_D = centred_gain(anatomy, post, direct_D)
            through = {a: moved_by_attention(anatomy, layer, a, neuron) for a in (0, 1)}
            for attention_layer, vector_D in {None: direct_D, **through}.items():
                for sign in (1, -1):
                    row = found[layer, neuron, attention_layer, sign]
                    ids = first_tokens(anatomy, sign * vector_D, 11)
                    hits = [token for token in ids if concept_V[token] >= 0]
                    assert row["hits"] == len(hits)
                    names = [NUMBERS.names[int(concept_V[token])] for token in hits]
                    assert json.loads(row["concepts"] or "[]") == list(dict.fromkeys(names))
                    if hits or attention_layer is None:
                        assert json.loads(row["tokens"]) == tokenizer.convert_ids_to_tokens(ids[:10])
                    else:
                        assert row["tokens"] is None
    kept = scan_rows(Concepts(NUMBERS, 11, (0, 1), None), anatomy)
    assert {(r["layer"], r["attention_layer"]) for r in kept} == {(0, None), (1, None), (None, None), (0, 1), (None, 1)}
    for row in kept:
        twin = found[row["layer"], row["neuron"], row["attention_layer"], 1]
        assert row["hits"] == len(json.loads(twin["concepts"] or "[]"))
        assert (row["concepts"], row["tokens"], row["sign"]) == (twin["concepts"], twin["tokens"], 1)


def test_random_directions_are_drawn_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes longer than reading them: half a second for Llama-2-7B, and every attention layer has some."""
    drawn, draw = [], rows_of_concepts._random_directions
    monkeypatch.setattr(rows_of_concepts, "_random_directions", lambda part: drawn.append(1) or draw(part))
    rows = scan_rows(Concepts(NUMBERS, 11, into="all"), Anatomy(tiny_model("llama")))
    assert len({row["attention_layer"] for row in rows if row["layer"] is None}) == 3
    assert len(drawn) == 1


def test_an_attention_layer_is_prepared_once_for_all_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_of_concepts, "LAYERS_A_FILE", 1)
    made, make = [], concepts.value_output_matrix
    monkeypatch.setattr(concepts, "value_output_matrix", lambda part, layer: made.append(layer) or make(part, layer))
    scan_rows(Concepts(NUMBERS, 11, (0, 1, 2), None, "all", "both"), Anatomy(tiny_model("llama")))
    assert made == [0, 1]


def test_a_vector_that_is_not_finite_is_named_with_its_layers() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        Anatomy(model).value_vectors(0)[4, 2] = torch.nan
    with pytest.raises(FloatingPointError, match="layer 0, attention layer 1: vector 4 is NaN"):
        scan_rows(Concepts(NUMBERS, 11, (0,), (1,)), Anatomy(model), first=1)


def test_random_directions_are_the_same_in_every_file() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    vectors_KD = torch.randn(40, 32, generator=generator).double()
    rows = {
        (r["neuron"], r["attention_layer"]): r for r in scan_rows(Concepts(NUMBERS, 11), anatomy) if r["layer"] is None
    }
    for neuron in range(40):
        ids = first_tokens(anatomy, vectors_KD[neuron] @ value_output_matrix(anatomy, 1), 10)
        shown = rows[neuron, 1]["tokens"]
        assert shown is None or json.loads(shown) == tiny_tokenizer().convert_ids_to_tokens(ids)
    assert any(rows[neuron, 1]["tokens"] for neuron in range(40))


def test_default_layers_and_shards() -> None:
    shape = Anatomy(tiny_model("llama")).shape
    paper = replace(shape, n_layers=32, vocabulary=32_000)
    assert Concepts().chosen(paper) == (list(range(16)), list(range(17)))
    shards = Concepts().shards(paper, ())
    pairs = [(s.work["attention_layer"], layer) for s in shards for layer in s.work["layers"]]
    through = {(a, layer) for a, layer in pairs if a is not None and layer is not None}
    assert through == {(a, layer) for a in range(17) for layer in range(16) if a > layer}
    assert {layer for a, layer in pairs if a is None} == {*range(16), None}
    assert len(pairs) == len(set(pairs)) == 136 + 17 + 16  # later pairs; values read directly; random through 1..16
    assert max(len(s.work["layers"]) for s in shards) == 4
    assert len(Concepts(into="all").shards(paper, ())) == 18 * 5
    assert [default_top(size) for size in (139, 4_000, 32_000, 49_152)] == [5, 6, 50, 50]
    renamed = ConceptList("other name", read_concepts().concepts)
    assert Concepts(renamed).parameters()["concepts"] == Concepts().parameters()["concepts"]
    assert Concepts(NUMBERS).parameters()["concepts"] != Concepts().parameters()["concepts"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"into": "earlier"}, "`into` 'earlier' is not known; take one of later, all"),
        ({"sign": "minus"}, "`sign` 'minus' is not known"),
        ({"count": "words"}, "`count` 'words' is not known"),
        ({"top": 0}, "`top` 0 is too small; give 1 or more"),
        ({"top": VOCABULARY}, "hold every concept: choose a smaller `top`, for example 5"),
        ({"layers": (3,)}, "layer 3 does not exist"),
        ({"attention_layers": (7,)}, "layer 7 does not exist"),
        ({"layers": (1, 2), "attention_layers": (0, 1)}, "no attention layer up to 1 comes after neuron layer 1"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Concepts(**{"top": 5, **fields}).shards(Anatomy(tiny_model("llama")).shape, ())


def test_a_crowded_top_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    shape = Anatomy(tiny_model("llama")).shape
    Concepts(top=20).shards(shape, ())
    assert not caplog.records
    Concepts(top=21).shards(shape, ())
    assert "the first 21 of 160 tokens" in caplog.text
