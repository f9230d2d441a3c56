"""Neurons through attention to the vocabulary: against the model's own modules and against sorting, in float64."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.cluster.ray_cluster import connection
from mathinterp.errors import UserError
from mathinterp.forward import concepts
from mathinterp.forward.concepts import (
    NO_CONCEPT,
    ConceptReader,
    concept_hits,
    top_ids,
    value_output_matrix,
)
from mathinterp.forward.layers import recorded
from mathinterp.forward.lens import written_values
from mathinterp.forward.neuron_ablation import NeuronSets, neuron_mask
from mathinterp.models.anatomy import Anatomy
from mathinterp.report.concepts import kept_neurons, summarize_concepts
from mathinterp.scans.base import Subject
from mathinterp.scans.concept_words import ConceptList, read_concepts, token_texts
from mathinterp.scans.concept_zeroing import ConceptZeroing, NeuronSet
from mathinterp.scans.concepts import ConceptScan, default_top, match_vocabulary
from mathinterp.scans.neuron_controls import has_control, layer_matched_neurons
from mathinterp.store import Store
from mathinterp.store.schema import TABLES
from tests.prompt_tokenizers import gpt2_like, llama_like
from tests.small_store import FINGERPRINT, open_run, prompt
from tests.test_forward import PROMPTS, anatomy
from tests.tiny import VOCABULARY, save_tiny, tiny_model, tiny_tokenizer

assert anatomy  # the fixture: every tiny family in float64

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


# ---- the plain twin: one neuron at a time, one head at a time, from the family's own modules ----


def centred_gain(anatomy: Anatomy, norm: torch.nn.Module, vector_D: torch.Tensor) -> torch.Tensor:
    """A norm's output times its scale, without its bias."""
    if isinstance(norm, torch.nn.LayerNorm):
        return (vector_D - vector_D.mean()) * norm.weight
    return vector_D * (norm.weight + (1 if anatomy.shape.model_type == "gemma2" else 0))


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


# ---- concepts and tokens ----


def test_the_default_concepts_are_those_of_the_paper() -> None:
    found = read_concepts()
    names = set(found.names)
    assert {*"0123456789", "zero", "twenty", "ninety", "hundred", "thousand", "first", "II", "XX", "²", "plus"} <= names
    assert "I" not in names
    assert found.label == "default"
    assert found.numbers(["times", "equals", "equal", "−", "-", "zwei", "三", "I", "teapots", ""]) == [
        found.names.index("times"), found.names.index("equal"), found.names.index("equal"), found.names.index("-"),
        found.names.index("-"), found.names.index("zwei"), found.names.index("三"), None, None, None,
    ]  # fmt: skip


def test_small_letters_are_found_in_any_case_and_capitals_as_written() -> None:
    listed = ConceptList("test", (("two", "twice"), ("II",), ("V", "five")))
    texts = ["two", " Two", "TWICE", "▁two", "II", "ii", "Ii", "v", "V", "FIVE", None]
    assert listed.numbers(texts) == [0, 0, 0, 0, 1, None, None, None, 2, 2, None]


def test_tokens_of_three_tokenizers() -> None:
    listed = ConceptList("test", (("two",), ("2",), ("plus",)))
    tokenizer = llama_like(["two plus 2"])
    vocabulary = len(tokenizer) + 3  # rows of the unembedding without a token
    texts = token_texts(tokenizer, vocabulary)
    assert texts[tokenizer.convert_tokens_to_ids("<0x32>")] is None  # the byte of "2" is no word
    assert texts[tokenizer.bos_token_id] is None
    assert texts[-3:] == [None] * 3
    found = match_vocabulary(listed, tokenizer, vocabulary)
    spelled = {tokenizer.convert_ids_to_tokens(i): int(n) for i, n in enumerate(found.concept_V[:-3]) if n >= 0}
    assert spelled == {"▁two": 0, "2": 1, "▁plus": 2}
    assert (found.tokens, found.concepts) == (3, 3)
    assert found.shown[-1] == f'"<{vocabulary - 1}>"'

    bytes_level = gpt2_like(["two plus two plus 2"] * 20)
    found = match_vocabulary(listed, bytes_level, len(bytes_level))
    spelled = {bytes_level.convert_ids_to_tokens(i): int(n) for i, n in enumerate(found.concept_V) if n >= 0}
    assert {"two": 0, "Ġtwo": 0, "Ġplus": 2, "2": 1}.items() <= spelled.items()
    with pytest.raises(UserError, match="none of the 1 concepts of 'test' is a token of the model"):
        match_vocabulary(ConceptList("test", (("teapot",),)), tiny_tokenizer(), VOCABULARY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: .* in line 1, column 2"),
        ('["two"]', "must be a JSON object of categories, not a list"),
        ('{"a": "two"}', "category 'a' must be a list of concepts, not a text"),
        ('{"a": [2]}', "category 'a': 2 is neither a spelling nor a list of spellings"),
        ('{"a": [[]]}', r"\[\] is neither a spelling"),
        ('{"a": [["two", null]]}', "null] is neither a spelling"),
        ('{"a": [" two"]}', "' two' is empty or has white space around it"),
        ('{"a": [""]}', "'' is empty"),
        ('{"a": ["two"], "b": [["deux", "two"]]}', "'two' stands in category 'a' and again in 'b'"),
        ('{"a": ["two"], "a": ["three"]}', "category 'a' is there twice"),
        ('{"a": []}', "has no concepts"),
        (b"\xff", "is not UTF-8 text"),
        (None, "cannot be read"),
    ],
)
def test_broken_concept_files(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as raised:
        read_concepts(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


# ---- the scan ----

NUMBERS = ConceptList("numbers", (*((digit,) for digit in "0123456789"), ("two", "twelve"), ("three",), ("plus", "+")))


def scan_rows(scan: ConceptScan, anatomy: Anatomy) -> list[dict[str, Any]]:
    state = scan.prepare(Subject(anatomy, (), tokenizer=tiny_tokenizer()))
    rows: list[dict[str, Any]] = []
    for shard in scan.shards(anatomy.shape, ()):
        table = scan.run(state, shard)
        assert table.schema == scan.schemas[shard.table]
        rows += table.to_pylist()
    assert scan.notes(state)["expected_hits"] == pytest.approx(scan.top * 15 / VOCABULARY)
    return rows


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_scan_rows_by_hand(family: str) -> None:
    """Both signs and all tokens; and, from the same first tokens, what the other options store."""
    anatomy, tokenizer = Anatomy(tiny_model(family)), tiny_tokenizer()
    concept_V = match_vocabulary(NUMBERS, tokenizer, VOCABULARY).concept_V
    rows = scan_rows(ConceptScan(NUMBERS, 11, (0, 1), None, "all", "both", "tokens"), anatomy)
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
    kept = scan_rows(ConceptScan(NUMBERS, 11, (0, 1), None), anatomy)
    assert {(r["layer"], r["attention_layer"]) for r in kept} == {(0, None), (1, None), (None, None), (0, 1), (None, 1)}
    for row in kept:
        twin = found[row["layer"], row["neuron"], row["attention_layer"], 1]
        assert row["hits"] == len(json.loads(twin["concepts"] or "[]"))
        assert (row["concepts"], row["tokens"], row["sign"]) == (twin["concepts"], twin["tokens"], 1)


def test_random_directions_are_the_same_in_every_file() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    vectors_KD = torch.randn(40, 32, generator=generator).double()
    rows = {
        (r["neuron"], r["attention_layer"]): r
        for r in scan_rows(ConceptScan(NUMBERS, 11), anatomy)
        if r["layer"] is None
    }
    for neuron in range(40):
        ids = first_tokens(anatomy, vectors_KD[neuron] @ value_output_matrix(anatomy, 1), 10)
        shown = rows[neuron, 1]["tokens"]
        assert shown is None or json.loads(shown) == tiny_tokenizer().convert_ids_to_tokens(ids)
    assert any(rows[neuron, 1]["tokens"] for neuron in range(40))


def test_default_layers_and_shards() -> None:
    shape = Anatomy(tiny_model("llama")).shape
    paper = replace(shape, n_layers=32, vocabulary=32_000)
    assert ConceptScan().chosen(paper) == (list(range(16)), list(range(17)))
    shards = ConceptScan().shards(paper, ())
    pairs = [(s.work["attention_layer"], layer) for s in shards for layer in s.work["layers"]]
    through = {(a, layer) for a, layer in pairs if a is not None and layer is not None}
    assert through == {(a, layer) for a in range(17) for layer in range(16) if a > layer}
    assert {layer for a, layer in pairs if a is None} == {*range(16), None}
    assert len(pairs) == len(set(pairs)) == 136 + 17 + 16  # later pairs; values read directly; random through 1..16
    assert max(len(s.work["layers"]) for s in shards) == 4
    assert len(ConceptScan(into="all").shards(paper, ())) == 18 * 5
    assert [default_top(size) for size in (139, 4_000, 32_000, 49_152)] == [5, 6, 50, 50]
    renamed = ConceptList("other name", read_concepts().concepts)
    assert ConceptScan(renamed).parameters()["concepts"] == ConceptScan().parameters()["concepts"]
    assert ConceptScan(NUMBERS).parameters()["concepts"] != ConceptScan().parameters()["concepts"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"into": "earlier"}, "--into 'earlier' is not known; take one of later, all"),
        ({"sign": "minus"}, "--sign 'minus' is not known"),
        ({"count": "words"}, "--count 'words' is not known"),
        ({"top": 0}, "first 0 tokens"),
        ({"top": VOCABULARY}, "hold every concept: choose a smaller --top, for example 5"),
        ({"layers": (3,)}, "layer 3 does not exist"),
        ({"attention_layers": (7,)}, "layer 7 does not exist"),
        ({"layers": (1, 2), "attention_layers": (0, 1)}, "no attention layer up to 1 comes after neuron layer 1"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConceptScan(**{"top": 5, **fields}).shards(Anatomy(tiny_model("llama")).shape, ())


def test_a_crowded_top_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    shape = Anatomy(tiny_model("llama")).shape
    ConceptScan(top=20).shards(shape, ())
    assert not caplog.records
    ConceptScan(top=21).shards(shape, ())
    assert "the first 21 of 160 tokens" in caplog.text


# ---- zeroing ----


def test_random_neurons_match_each_layer_and_leave_out_the_set() -> None:
    shape = Anatomy(tiny_model("llama")).shape
    neurons = [(0, n) for n in range(15)] + [(2, 3), (2, 39)]
    drawn = layer_matched_neurons(shape, neurons, seed=0)
    assert Counter(layer for layer, _ in drawn) == {0: 15, 2: 2}
    assert len(set(drawn)) == 17
    assert not set(drawn) & set(neurons)
    assert drawn == layer_matched_neurons(shape, neurons, seed=0)
    assert drawn != layer_matched_neurons(shape, neurons, seed=1)
    assert has_control(shape, neurons)
    assert not has_control(shape, [(0, n) for n in range(21)])


def test_zeroing_rows_are_those_of_the_sets(anatomy: Anatomy) -> None:
    half, few = NeuronSet(0, tuple((0, n) for n in range(21))), NeuronSet(1, ((0, 3), (1, 7)))
    scan = ConceptZeroing((half, few), "source", seeds=2)
    state = scan.prepare(Subject(anatomy, PROMPTS[:6]))
    shards = scan.shards(anatomy.shape, PROMPTS[:6])
    assert [(s.key, s.work.get("passes")) for s in shards] == [
        ("baseline/00000", None), ("concept_zeroing/00000", 1), ("concept_zeroing/00001", 3),
    ]  # fmt: skip
    assert [scan.evaluations(shard, PROMPTS[:6]) for shard in shards] == [6, 6, 18]
    baseline = scan.run(state, shards[0])
    assert scan.run(state, shards[1]).column("zeroed").unique().to_pylist() == [21]
    table = scan.run(state, shards[2])
    assert table.schema == scan.schemas["concept_zeroing"]
    engine = NeuronSets(anatomy, PROMPTS[:6])
    assert baseline["logprob"].to_pylist() == pytest.approx(engine.baseline().logprob_EA[0].tolist())
    for kind, seed, neurons in (
        ("concepts", 0, few.neurons),
        ("random", 0, layer_matched_neurons(anatomy.shape, few.neurons, 0)),
        ("random", 1, layer_matched_neurons(anatomy.shape, few.neurons, 1)),
    ):
        rows = [r for r in table.to_pylist() if (r["neurons"], r["seed"]) == (kind, seed)]
        scores = engine.run_masks([neuron_mask(anatomy, neurons)])
        assert [r["logprob"] for r in rows] == pytest.approx(scores.logprob_EA[0].tolist(), rel=1e-6)
        assert {(r["level"], r["zeroed"]) for r in rows} == {(1, 2)}
    assert scan.parameters()["sets"] != ConceptZeroing((half, NeuronSet(1, ((0, 3),))), "source").parameters()["sets"]
    with pytest.raises(UserError, match="--scoring 'all' is not known"):
        ConceptZeroing((few,), "source", scoring="all")


# ---- views ----


def queries(store: Store) -> Callable[[str], list[dict[str, Any]]]:
    """Queries on one connection: building all views takes longest."""
    connection = store.connect()
    return lambda sql: connection.sql(sql).to_arrow_table().to_pylist()


def concept_row(layer: int | None, neuron: int, attention: int | None, hits: int, sign: int = 1) -> dict[str, Any]:
    names = json.dumps([f"c{n}" for n in range(hits)]) if hits else None
    tokens = json.dumps([f"\nt{layer}.{neuron}.{attention}.{sign}"]) if hits or attention is None else None
    return {"layer": layer, "neuron": neuron, "attention_layer": attention, "sign": sign, "hits": hits,
            "concepts": names, "tokens": tokens}  # fmt: skip


@pytest.fixture(scope="module")
def concept_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """Three neurons of layer 0, one of layer 1, one random direction; attention layers 1 and 2, both signs."""
    store = Store(tmp_path_factory.mktemp("concepts"))
    hits = {  # (layer, neuron, attention): hits of plus, of minus
        (0, 0, None): (0, 0), (0, 0, 1): (1, 3), (0, 0, 2): (3, 3),
        (0, 1, None): (2, 1), (0, 1, 1): (0, 0), (0, 1, 2): (0, 0),
        (0, 2, None): (1, 0), (0, 2, 1): (2, 0), (0, 2, 2): (2, 1),
        (1, 0, None): (0, 4), (1, 0, 2): (0, 1),
        (None, 0, None): (0, 0), (None, 0, 1): (1, 0), (None, 0, 2): (4, 4),
    }  # fmt: skip
    rows = [
        concept_row(*key, count, sign) for key, pair in hits.items() for count, sign in zip(pair, (1, -1), strict=True)
    ]
    run = open_run(store, ["concept_scan/00000"], scan="concepts", parameters={"count": "distinct"})
    schema = TABLES["concept_scan"].schema
    store.write_shard(run.run_id, "concept_scan", 0, pa.Table.from_pylist(rows, schema), {})
    run.note({"concept_tokens": 7, "concepts_in_vocabulary": 6, "expected_hits": 0.25})
    run.finish()
    return store, run.run_id


def test_best_attention_layer_levels_and_chance(concept_store: tuple[Store, str]) -> None:
    ask = queries(concept_store[0])
    rows = ask("SELECT * FROM concept_neurons ORDER BY layer, neuron")
    assert list(rows[0])[:7] == ["run_id", "layer", "neuron", "attention_layer", "hits", "concepts", "tokens"]
    found = [tuple(r[c] for c in ("layer", "neuron", "attention_layer", "sign", "hits", "direct_hits")) for r in rows]
    assert found == [
        (0, 0, 2, 1, 3, 0),  # plus before minus, though a lower layer has as many with minus
        (0, 1, None, None, 0, 2),
        (0, 2, 1, 1, 2, 1),  # the lower of two layers
        (1, 0, 2, -1, 1, 4),  # and the direct reading of the same sign
    ]
    levels = ask("SELECT layer, level, kept, direct, total, share FROM concept_levels ORDER BY layer, level")
    over_all = [(r["level"], r["kept"], r["direct"], r["total"]) for r in levels if r["layer"] is None]
    assert over_all == [(0, 3, 3, 4), (1, 2, 2, 4), (2, 1, 1, 4), (3, 0, 1, 4), (4, 0, 0, 4)]
    assert [(r["kept"], r["share"]) for r in levels if r["layer"] == 1][:2] == [(1, 1.0), (0, 0.0)]
    shares = {
        (r["attention_layer"], r["level"]): (r["neurons"], r["random"], r["pairs"])
        for r in ask("SELECT * FROM concept_chance")
    }
    assert shares[1, 0] == (3 / 6, 1 / 2, 6)
    assert shares[2, 0] == (5 / 8, 1.0, 8)
    assert shares[2, 2] == (2 / 8, 1.0, 8)
    assert shares[None, 0] == (4 / 8, 0.0, 8)
    pairs = ask("SELECT * FROM concept_layers WHERE layer = 0 ORDER BY attention_layer NULLS FIRST")
    assert [(r["attention_layer"], r["n"], r["with_hits"], r["most_hits"], r["best_of"]) for r in pairs] == [
        (None, 6, 3, 2, 0), (1, 6, 3, 3, 1), (2, 6, 4, 3, 1),
    ]  # fmt: skip


def test_table_forms_and_kept_neurons(concept_store: tuple[Store, str]) -> None:
    store, run_id = concept_store
    assert kept_neurons(store, run_id, [0, 1, 2, 3]) == {0: ((0, 0), (0, 2), (1, 0)), 1: ((0, 0), (0, 2)), 2: ((0, 0),)}
    table = store.rows("SELECT level, neurons, total, share, expected_hits FROM paper_a_table7 ORDER BY level")
    assert [tuple(row.values()) for row in table] == [
        (0, 3, 4, 75, 0.25), (1, 2, 4, 50, 0.25), (2, 1, 4, 25, 0.25), (3, 0, 4, 0, 0.25),
    ]  # fmt: skip
    summary = summarize_concepts(store, run_id, [1, 9], 2)
    shown, examples = summary.levels, summary.examples
    assert [row["neurons"] for row in shown] == [2, 0]
    assert shown[0]["one layer (%)"] == pytest.approx(100 * (2 / 6 * 6 + 3 / 8 * 8) / 14)
    assert shown[0]["random (%)"] == pytest.approx(100 * (0 * 6 + 1 * 8) / 14)
    assert [(r["neuron"], r["attention"], r["hits"], r["concepts"]) for r in examples] == [
        ("0_0", 2, 3, "c0 c1 c2"), ("0_2", 1, 2, "c0 c1"),
    ]  # fmt: skip
    assert examples[0]["tokens through attention"] == "\\nt0.0.2.1"
    assert examples[0]["tokens read directly"] == "\\nt0.0.None.1"
    assert summary.chance == {"concepts": 6, "tokens": 7, "expected_hits": 0.25}


def relative_drop(units: dict[str, list[tuple[int, int, int]]], weights: dict[str, np.ndarray]) -> float:
    """(original - zeroed) / original of mean accuracies over operations; units are (n, baseline hits, hits)."""
    sums = {name: (np.array(rows) * weights[name][:, None]).sum(0) for name, rows in units.items()}
    original = sum(before / n for n, before, _ in sums.values())
    return float((original - sum(after / n for n, _, after in sums.values())) / original)


def test_zeroing_effects_against_reweighted_prompts(tmp_path: Path) -> None:
    """The interval is that of the infinitesimal jackknife: each prompt's weight moved a little, numerically."""
    rng, store = np.random.default_rng(0), Store(tmp_path)
    items, baseline, zeroed = [], [], []
    units: dict[str, list[tuple[int, int, int]]] = {"add": [], "sub": []}
    for operation, count in (("add", 9), ("sub", 14)):
        for number in range(count):
            tokens = int(rng.integers(1, 4))
            name = f"{operation}{number}"
            items.append(prompt(name, operation, ["memorize"] * tokens))
            before, after = rng.random(tokens) < 0.8, rng.random(tokens) < 0.5
            units[operation].append((tokens, int(before.sum()), int(after.sum())))
            for position in range(tokens):
                row = {"prompt_id": name, "position": position, "logit": 0.0, "predicted_id": 1}
                baseline.append({**row, "correct": bool(before[position]), "logprob": -1.0})
                cut = {**row, "correct": bool(after[position]), "logprob": -1.5, "level": 2, "zeroed": 5}
                zeroed.append({**cut, "neurons": "concepts", "seed": 0})
                zeroed += [
                    {**cut, "neurons": "random", "seed": seed, "correct": bool(before[position])} for seed in (0, 1)
                ]
    run = open_run(store, ["baseline/00000", "concept_zeroing/00000"], scan="concept_zeroing")
    store.write_prompts(FINGERPRINT, items)
    for table, rows in (("baseline", baseline), ("concept_zeroing", zeroed)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, TABLES[table].schema), {})
    run.finish()
    ask = queries(store)
    effects = ask("SELECT * FROM concept_zeroing_effects WHERE neurons = 'concepts'")
    assert {row["operation"] for row in effects} == {"add", "sub", "all"}
    for row in effects:
        chosen = units if row["operation"] == "all" else {row["operation"]: units[row["operation"]]}
        even = {name: np.ones(len(rows)) for name, rows in chosen.items()}
        assert row["relative_drop"] == pytest.approx(relative_drop(chosen, even))
        variance = 0.0
        for name, rows in chosen.items():
            moved = []
            for number in range(len(rows)):
                heavy = {other: weights.copy() for other, weights in even.items()}
                heavy[name][number] += 1e-6
                moved.append((relative_drop(chosen, heavy) - relative_drop(chosen, even)) / 1e-6)
            variance += len(rows) / (len(rows) - 1) * float(np.square(moved).sum())
        assert row["relative_drop"] - row["low"] == pytest.approx(1.959963984540054 * math.sqrt(variance), rel=1e-4)
        assert row["high"] == pytest.approx(min(1, 2 * row["relative_drop"] - row["low"]))
        assert row["logprob_change"] == pytest.approx(-0.5)
    table = {row["operation"]: row for row in ask("SELECT * FROM paper_a_table8")}
    assert (table["all"]["level"], table["all"]["neurons"], table["all"]["random_sets"]) == (2, 5, 2)
    assert (table["all"]["random"], table["add"]["random_most"]) == (0, 0)
    assert table["sub"]["decrease"] == pytest.approx(
        100 * next(r for r in effects if r["operation"] == "sub")["relative_drop"]
    )


# ---- the command ----


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, ["scan", "concepts", *map(str, words)])


@pytest.mark.ray
def test_command_counts_zeroes_and_resumes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    command = ["--model", folder, "--store", tmp_path / "store", "--replicas", 1, "--top", 6, "--levels", "1,3,6",
               "--limit", 4, "--control-seeds", 1, "--json"]  # fmt: skip
    with connection(None):  # one Ray for both runs
        first = invoke(*command)
    assert first.exit_code == 0, first.output
    printed = json.loads(first.stdout)
    assert [row["of"] for row in printed["levels"]] == [40] * 3
    assert printed["levels"][0]["neurons"] > printed["levels"][1]["neurons"] > 0
    assert {row["hits more than"] for row in printed["zeroing"]["decreases"]} == {1, 3}  # none has more than 6
    store = Store(tmp_path / "store")
    assert len(store.rows("SELECT * FROM concept_neurons")) == 40
    shown = invoke(*command[:-1])
    assert shown.exit_code == 0, shown.output
    assert "0 rows in" in shown.stdout  # nothing is computed again
    assert "nothing left to compute; 3 of 3 shards were there already" in shown.stdout
    assert "tokens spell" in shown.stdout
    assert "All of them at zero" in shown.stdout


def test_mistakes_in_the_command_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": [1]}')
    other = tmp_path / "other.json"
    other.write_text('{"a": ["unfindable"]}')
    for words, part in (
        (["--concepts", broken], "neither a spelling"),
        (["--concepts", tmp_path / "none.json"], "cannot be read"),
        (["--concepts", other], "none of the 1 concepts"),
        (["--levels", "a"], "--levels 'a' cannot be read"),
        (["--top", "500"], "hold every concept"),
        (["--top", "0"], "first 0 tokens"),
        (["--layers", "9"], "layer 9 does not exist"),
        (["--control-seeds", "-1"], "-1 random draws"),
        (["--scoring", "x"], "--scoring 'x'"),
    ):
        result = invoke("--store", tmp_path / "s", *words)
        assert result.exit_code == 2, result.output
        assert part in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
