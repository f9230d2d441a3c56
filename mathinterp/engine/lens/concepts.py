"""What attention makes of a neuron: its value through an attention layer's value-output matrix, to the vocabulary.

method.md section 5, last part (paper A, section 4.4). Neuron k of layer l writes its value v into the residual stream.
Attention layer a, were every head to look at that token with weight 1, writes W_O W_V (g_a * v): the sum over its query
heads, each with the value rows of its own key/value group. The final norm's gain and the unembedding turn that into
logits. Each norm's positive scale is left out, since it does not change which tokens come first, and so the result
needs no input; biases are left out too, since without a scale they have no size relative to v. A LayerNorm's mean is
subtracted. Where a family has norms behind the blocks (Gemma-2), their gains are part of v and of what attention
writes. A final soft-cap keeps the order.

Two ways to the logits. In the wide dtype: the vectors times W_O W_V, D x D, and then the unembedding. Where the weights
are half-precision and on a GPU: W_O W_V and the unembedding multiplied out once an attention layer, D x V, and split in
two halves (halves.py); a neuron's value is half-precision itself, so that one product on tensor cores says of most
vectors that no concept can be among their first tokens, and only the others' logits are completed.

Shape legend: K neuron, D model width, H query head, G key/value group, Z features of the groups (G * d_head), V
vocabulary, X group of tokens, N vectors, R rows that are looked at closely, T top tokens, S groups that hold them, C
concept token, F factors of a limit, M concept tokens found, I tokens of those groups.
"""

from dataclasses import dataclass

import torch

from mathinterp.engine.batching import in_batches
from mathinterp.engine.halves import Halves, HalvesProduct, product_in_halves
from mathinterp.engine.lens.lens import Lens, norm_parts, wide_dtype
from mathinterp.models.anatomy import Anatomy

NO_CONCEPT = -1
CPU_LOGITS = 2**24  # held at once: 64 MiB
GPU_LOGITS = 2**29
GROUP = 32  # tokens whose maximum stands for them
FEW_GROUPS = 4  # of fewer groups than this for each token sought, all tokens are looked through


@torch.inference_mode()
def value_output_matrix(anatomy: Anatomy, layer: int) -> torch.Tensor:
    """D D: ``v @ matrix`` is what attention ``layer`` writes about v, every head at weight 1, up to a positive scale.

    The layer's input norm (gain and, for a LayerNorm, subtraction of the mean) is folded in, and so is the gain of a
    norm behind attention. Heads of one key/value group read the same values, so their blocks of W_O are summed.
    """
    shape, wide = anatomy.shape, wide_dtype(anatomy.dtype)
    value_ZD = anatomy.value(layer).weight.detach().to(wide)
    output_HdD = anatomy.output_weight(layer).detach().to(wide)
    output_ZD = output_HdD.unflatten(0, (shape.n_groups, -1, shape.d_head)).sum(dim=1).flatten(0, 1)
    norm = norm_parts(anatomy, anatomy.attention_norm(layer))
    matrix_DD: torch.Tensor = norm.gain_D[:, None] * (value_ZD.T @ output_ZD)
    if norm.centred:
        matrix_DD -= matrix_DD.mean(dim=0)
    post = anatomy.attention_post_norm(layer)
    return matrix_DD if post is None else matrix_DD * norm_parts(anatomy, post).gain_D


@dataclass(frozen=True)
class FirstTokens:
    """The first tokens of some of the vectors that were read.

    rows_R: which vectors, ascending. ids_RT: token ids, likeliest first, equal logits by id. All on the CPU.
    """

    rows_R: torch.Tensor
    ids_RT: torch.Tensor


class ConceptReader:
    """Finds the vectors that have concept tokens among their ``top`` first tokens.

    Most vectors have none, and that is seen without looking for the first tokens: where ``top`` groups of tokens have
    their maximum above the largest concept token, ``top`` tokens are above it. Only the other vectors' first tokens are
    looked up. Exact, ties included.

    Args:
        concept_V: the number of each token's concept, NO_CONCEPT where it has none.
        top: how many tokens count as first; fewer than the vocabulary.
        attention_layer: through whose value-output matrix vectors are read; None: they are read directly.
    Raises FloatingPointError if that matrix, multiplied out with the unembedding, is not finite.
    """

    def __init__(self, anatomy: Anatomy, concept_V: torch.Tensor, top: int, attention_layer: int | None = None):
        assert len(concept_V) == anatomy.shape.vocabulary > top > 0
        self.top = top
        self._concept_V = concept_V.to(anatomy.device)
        self._ids_C = (self._concept_V != NO_CONCEPT).nonzero()[:, 0]
        assert len(self._ids_C), "no token is a concept"
        lens = Lens(anatomy)
        on_gpu, is_wide = anatomy.device.type == "cuda", lens.unembedding_VD.dtype == lens.wide
        through_DD = None if attention_layer is None else value_output_matrix(anatomy, attention_layer)
        self._way = SplitWay(lens, through_DD) if on_gpu and not is_wide else WideWay(lens, through_DD)
        self._at_once = max(1, (GPU_LOGITS if on_gpu else CPU_LOGITS) // anatomy.shape.vocabulary)

    @torch.inference_mode()
    def read(self, vectors_ND: torch.Tensor, every: bool = False) -> FirstTokens:
        """First tokens of the vectors that have a concept among them, or of ``every`` vector.

        The vectors may be in the wide dtype or, where they are weights, in the model's.
        Raises FloatingPointError naming the first vector that is not finite.
        """
        rows_ND = self._way.rows(vectors_ND)
        lowest_N, highest_N = rows_ND.aminmax(dim=1)
        finite_N = lowest_N.isfinite() & highest_N.isfinite()
        if not finite_N.all():
            raise FloatingPointError(f"vector {int(finite_N.long().argmin())} is NaN or infinite")
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []

        def run(start: int, stop: int) -> None:
            rows_R, ids_RT = self._read_block(rows_ND[start:stop], every)
            parts.append((rows_R.cpu() + start, ids_RT.cpu()))

        self._at_once = in_batches(len(rows_ND), self._at_once, run)
        return FirstTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _read_block(self, rows_ND: torch.Tensor, every: bool) -> tuple[torch.Tensor, torch.Tensor]:
        product = self._way.product(rows_ND)
        if every:
            return torch.arange(len(rows_ND)), top_ids(product.whole(), self.top)
        rows_R = self._near(product)
        ids_RT = top_ids(product.rows(rows_R), self.top)
        with_hit_R = (self._concept_V[ids_RT] != NO_CONCEPT).any(dim=1).nonzero()[:, 0]
        return rows_R[with_hit_R], ids_RT[with_hit_R]

    def _near(self, product: "WholeProduct | HalvesProduct") -> torch.Tensor:
        """Rows where fewer than ``top`` groups are sure to be above every concept: R."""
        highest_NX = _group_maxima(product.first_NV)
        if isinstance(product, HalvesProduct) and not product.exact:
            limit_NF, limit_FV = product.limit
            highest_NX -= limit_NF @ _group_maxima(limit_FV)
            reach_NC = product.reach(self._ids_C)
        else:
            reach_NC = product.first_NV[:, self._ids_C]
        return ((highest_NX > reach_NC.amax(dim=1, keepdim=True)).sum(dim=1) < self.top).nonzero()[:, 0]


@dataclass(frozen=True)
class WholeProduct:
    """Logits that were computed whole; else like HalvesProduct."""

    first_NV: torch.Tensor

    def rows(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Some rows: R V."""
        return self.first_NV[rows_R]

    def whole(self) -> torch.Tensor:
        """Every row: N V."""
        return self.first_NV


class WideWay:
    """From vectors to logits in the wide dtype."""

    def __init__(self, lens: Lens, through_DD: torch.Tensor | None):
        self._lens, self._through_DD = lens, through_DD

    def rows(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        """The vectors as attention writes them: N D."""
        wide_ND = vectors_ND.to(self._lens.wide)
        return wide_ND if self._through_DD is None else wide_ND @ self._through_DD

    def product(self, rows_ND: torch.Tensor) -> WholeProduct:
        """Logits of such rows, up to a positive scale."""
        return WholeProduct(self._lens.directions(rows_ND))


class SplitWay:
    """From vectors to logits on tensor cores; what does not fit half-precision is split in two."""

    def __init__(self, lens: Lens, through_DD: torch.Tensor | None):
        self._lens, self._direct = lens, through_DD is None
        self._dtype = lens.unembedding_VD.dtype
        if through_DD is None:
            self._right = Halves(lens.unembedding_VD, None)
        else:
            self._right = product_in_halves(lens.unembedding_VD, lens.norm.centre(through_DD) * lens.norm.gain_D)
        self._lengths = self._right.lengths()
        if not self._lengths[0].isfinite().all():
            raise FloatingPointError("the unembedding, times the value-output matrix, is NaN or infinite")

    def rows(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        """What the unembedding multiplies (read directly), or the vectors as they are (through attention): N D."""
        if not self._direct:
            return vectors_ND
        return self._lens.norm.centre(vectors_ND.to(self._lens.wide)) * self._lens.norm.gain_D

    def product(self, rows_ND: torch.Tensor) -> HalvesProduct:
        """Logits of such rows, up to a positive scale."""
        if (
            rows_ND.dtype != self._dtype == torch.float16
        ):  # small numbers lose digits: each row by a power of two up to 1
            rows_ND = torch.ldexp(rows_ND, -rows_ND.abs().amax(dim=1, keepdim=True).frexp().exponent)
        return HalvesProduct(Halves.of(rows_ND, self._dtype), self._right, self._lengths)


def _group_maxima(values_NV: torch.Tensor) -> torch.Tensor:
    """The maximum of each group of GROUP tokens: N X. A rest that fills no group has none: it is left out."""
    in_groups = values_NV.shape[1] // GROUP * GROUP
    maxima_NX: torch.Tensor = values_NV[:, :in_groups].unflatten(1, (GROUP, -1)).amax(dim=1)
    return maxima_NX


def top_ids(logits_RV: torch.Tensor, top: int) -> torch.Tensor:
    """Ids of each row's ``top`` largest logits, largest first, equal ones in ascending order: R T."""
    values_RS, ids_RS = _largest(logits_RV, top + 1)
    if (values_RS[:, 1:] == values_RS[:, :-1]).any():  # topk picks and orders equal values as it likes
        by_id = ids_RS.sort(dim=1)
        by_value = values_RS.gather(1, by_id.indices).sort(dim=1, descending=True, stable=True)
        ids_RS = by_id.values.gather(1, by_value.indices)
        border_R = (values_RS[:, top - 1] == values_RS[:, top]).nonzero()[:, 0]
        if len(border_R):  # others may be as large as the last one
            ordered = logits_RV[border_R].sort(dim=1, descending=True, stable=True)
            ids_RS[border_R] = ordered.indices[:, : top + 1]
    return ids_RS[:, :top]


def _largest(logits_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's ``count`` largest logits, largest first, and ids of theirs.

    They are in the ``count`` groups with the largest maxima, or in the rest that fills no group: each of those groups
    has a logit that is no smaller than any logit outside them.
    """
    vocabulary = logits_RV.shape[1]
    groups = vocabulary // GROUP
    if groups < FEW_GROUPS * count:
        largest = logits_RV.topk(count, dim=1)
        return largest.values, largest.indices
    groups_RS = _group_maxima(logits_RV).topk(count, dim=1, sorted=False).indices
    within_G = torch.arange(GROUP, device=logits_RV.device) * groups
    ids_RI = (groups_RS[:, :, None] + within_G).flatten(1)
    rest_I = torch.arange(groups * GROUP, vocabulary, device=logits_RV.device)
    ids_RI = torch.cat([ids_RI, rest_I.expand(len(ids_RI), -1)], dim=1)
    largest = logits_RV.gather(1, ids_RI).topk(count, dim=1)
    return largest.values, ids_RI.gather(1, largest.indices)


def found_concepts(ids_RT: torch.Tensor, concept_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The concept tokens among rows of first tokens, row by row, likeliest first.

    Returns the row and the concept of each, and whether it is the row's first token of that concept: M each.
    """
    concept_RT = concept_V[ids_RT]
    row_M, place_M = (concept_RT != NO_CONCEPT).nonzero(as_tuple=True)
    number_M = concept_RT[row_M, place_M]
    ordered = (row_M * (1 + concept_V.max()) + number_M).sort(stable=True)
    repeated_M = torch.zeros_like(row_M, dtype=torch.bool)
    repeated_M[1:] = ordered.values[1:] == ordered.values[:-1]
    return row_M, number_M, ~torch.zeros_like(repeated_M).scatter_(0, ordered.indices, repeated_M)


def concept_hits(ids_RT: torch.Tensor, concept_V: torch.Tensor, distinct: bool) -> torch.Tensor:
    """How many of each row's tokens are concepts, or how many ``distinct`` concepts they are: R."""
    row_M, _, first_M = found_concepts(ids_RT, concept_V)
    return (row_M[first_M] if distinct else row_M).bincount(minlength=len(ids_RT))
