"""Products in two halves: against float64, and the concepts found with them against logits that are complete."""

from typing import Any

import pytest
import torch

from mathinterp.engine.halves import Halves, HalvesProduct, product_in_halves
from mathinterp.engine.lens import concepts
from mathinterp.engine.lens.concepts import NO_CONCEPT, ConceptReader, SplitWay, top_ids, value_output_matrix
from mathinterp.engine.lens.lens import Lens, written_values
from mathinterp.models.anatomy import Anatomy
from tests.tiny import VOCABULARY, tiny_model

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
TOP = 9


def drawn(rows: int, width: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device)


def product_of(left_ND: torch.Tensor, right_VD: torch.Tensor, dtype: torch.dtype) -> HalvesProduct:
    right = Halves.of(right_VD, dtype)
    return HalvesProduct(Halves.of(left_ND, dtype), right, right.lengths())


def error(found: torch.Tensor, left_ND: torch.Tensor, right_VD: torch.Tensor) -> float:
    exact = left_ND.double() @ right_VD.double().T
    return float((found.double() - exact).norm() / exact.norm())


# ---- products ----


@DEVICES
@HALF
def test_a_completed_product_keeps_sixteen_bits(dtype: torch.dtype, device: str) -> None:
    """The first product alone keeps eight or eleven; rows, whole and first agree about which row is which."""
    left, right = drawn(70, 256, 0, device), drawn(90, 256, 1, device)
    product = product_of(left, right, dtype)
    assert error(product.first_NV, left, right) > 1e-4
    rows_R = torch.tensor([3, 69, 8], device=device)
    chosen = product.rows(rows_R)
    assert error(chosen, left[rows_R], right) < 1e-5
    whole = product.whole()
    assert error(whole, left, right) < 1e-5
    torch.testing.assert_close(chosen, whole[rows_R], rtol=1e-5, atol=1e-5)


@DEVICES
@HALF
@pytest.mark.parametrize("lossless", ["neither", "left", "right"])
def test_no_entry_is_further_off_than_its_limit(lossless: str, dtype: torch.dtype, device: str) -> None:
    """Some rows are made as bad as can be: what they lose points along the other factor's row."""
    left, right = drawn(60, 64, 2, device), drawn(80, 64, 3, device)
    left[:20] = left[:20].sign() * (1 + 0.9 * torch.finfo(dtype).eps / 2)
    right[:20] = left[:20].sign()
    left = left.to(dtype).float() if lossless == "left" else left
    right = right.to(dtype).float() if lossless == "right" else right
    product = product_of(left, right, dtype)
    limit_NF, limit_FV = product.limit
    assert limit_NF.shape[1] == (2 if lossless == "neither" else 1)
    limit_NV = limit_NF @ limit_FV
    first = product.first_NV.clone()
    off_NV = (product.whole() - first).abs()
    assert (off_NV <= limit_NV).all()
    if lossless == "right":
        assert (off_NV / limit_NV).max() > 0.9, "nothing came near the limit: the test shows little"


@DEVICES
@HALF
def test_reach_is_a_little_above_the_completed_columns(dtype: torch.dtype, device: str) -> None:
    left, right = drawn(60, 64, 10, device), drawn(80, 64, 11, device)
    product = product_of(left, right, dtype)
    columns_C = torch.tensor([70, 3, 12], device=device)
    reach_NC, limit_NV = product.reach(columns_C), torch.matmul(*product.limit)
    whole_NC = product.whole()[:, columns_C]
    assert (reach_NC > whole_NC).all()
    assert (reach_NC - whole_NC <= 0.02 * limit_NV[:, columns_C] + 1e-5).all()


def test_what_half_precision_holds_needs_no_rest() -> None:
    left, right = drawn(5, 16, 4).bfloat16().float(), drawn(7, 16, 5).bfloat16().float()
    for as_given in (left, left.bfloat16()):
        product = product_of(as_given, right, torch.bfloat16)
        assert product.exact
        torch.testing.assert_close(product.whole(), left @ right.T)


@DEVICES
@HALF
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_a_matrix_multiplied_out_is_right_up_to_a_power_of_two(
    dtype: torch.dtype, scale: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mathinterp.engine.halves.BLOCK", 7 * 48)  # several blocks and a rest
    weight, matrix = drawn(40, 48, 6, device).to(dtype), scale * drawn(48, 48, 7, device)
    halves = product_in_halves(weight, matrix)
    assert halves.low_ND is not None
    found = halves.high_ND.double() + halves.low_ND.double()
    exact = weight.double() @ matrix.double().T
    power = (exact.norm() / found.norm()).log2()
    torch.testing.assert_close(power, power.round(), rtol=0, atol=1e-5)
    assert (found * 2 ** power.round() - exact).norm() / exact.norm() < 1e-5


# ---- concepts found with them ----


def some_concepts() -> torch.Tensor:
    torch.manual_seed(2)
    concept_V = torch.where(torch.rand(VOCABULARY) < 0.1, torch.randint(0, 6, (VOCABULARY,)), NO_CONCEPT)
    concept_V[7] = 3
    return concept_V


def split_reader(anatomy: Anatomy, attention_layer: int | None) -> ConceptReader:
    """A reader that goes the GPU's way on any device."""
    reader = ConceptReader(anatomy, some_concepts(), TOP, attention_layer)
    lens = Lens(anatomy)
    through_DD = None if attention_layer is None else value_output_matrix(anatomy, attention_layer)
    with torch.inference_mode():
        reader._way = SplitWay(lens, through_DD)
    return reader


@DEVICES
@HALF
@pytest.mark.parametrize("attention_layer", [None, 1])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_vectors_are_put_aside_exactly_when_no_concept_is_among_their_first_tokens(
    family: str, attention_layer: int | None, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows and tokens as where every row is completed; and those of float64, but for the closest."""
    monkeypatch.setattr(concepts, "GROUP", 3)
    model, exact_model = tiny_model(family, dtype=dtype), tiny_model(family)
    exact_model.load_state_dict(model.state_dict())
    model.to(device)
    anatomy, exact = Anatomy(model), Anatomy(exact_model)
    reader, concept_V = split_reader(anatomy, attention_layer), some_concepts()
    completed: list[int] = []
    rows_of = HalvesProduct.rows
    monkeypatch.setattr(
        HalvesProduct, "rows", lambda self, rows_R: completed.append(len(rows_R)) or rows_of(self, rows_R)
    )
    stored = anatomy.value_vectors(0).detach() if family != "gemma2" else written_values(anatomy, 0)
    vectors = {"values": written_values(anatomy, 0), "drawn": drawn(300, 32, 8, device), "stored": stored}
    exact_reader = ConceptReader(exact, concept_V, TOP, attention_layer)
    for name, vectors_ND in vectors.items():
        found = reader.read(vectors_ND)
        with torch.inference_mode():
            every_NT = top_ids(reader._way.product(reader._way.rows(vectors_ND)).whole(), TOP).cpu()
        rows_R = (concept_V[every_NT] != NO_CONCEPT).any(dim=1).nonzero()[:, 0]
        assert torch.equal(found.rows_R, rows_R)
        assert (found.ids_RT == every_NT[rows_R]).float().mean() > (0.999 if device == "cpu" else 0.99)
        twin = exact_reader.read(vectors_ND.cpu().double() if name == "drawn" else written_values(exact, 0), every=True)
        assert (every_NT == twin.ids_RT).float().mean() > 0.99
    looked_at = sum(len(vectors_ND) for vectors_ND in vectors.values())
    assert 0 < sum(completed) < looked_at, "all or none were completed: the test shows nothing"


def test_a_matrix_that_is_not_finite_is_said_so() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        Anatomy(model).value(1).weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="value-output matrix, is NaN or infinite"):
        split_reader(Anatomy(model), 1)


# ---- the largest logits ----


@DEVICES
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("vocabulary", [640, 653])
def test_the_first_tokens_are_in_the_groups_with_the_largest_maxima(
    vocabulary: int, crowded: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crowded: few values, so that ties cross groups. Against sorting; 653 has a rest that fills no group."""
    monkeypatch.setattr(concepts, "GROUP", 10)
    logits = drawn(200, vocabulary, 9)
    logits = (4 * logits).round() if crowded else logits
    gathered: list[Any] = []
    maxima = concepts._group_maxima
    monkeypatch.setattr(concepts, "_group_maxima", lambda values: gathered.append(1) or maxima(values))
    expected = [sorted(range(vocabulary), key=lambda token: (-row[token], token))[:12] for row in logits.tolist()]
    assert top_ids(logits.to(device), 12).tolist() == expected
    assert gathered, "all tokens were looked through"
