"""What attention makes of a neuron: its value through an attention layer's value-output matrix, to the vocabulary.

method.md section 5, last part (paper A, section 4.4). Neuron k of layer l writes its value v into the residual stream.
Attention layer a, were every head to look at that token with weight 1, writes W_O W_V (g_a * v): the sum over its query
heads, each with the value rows of its own key/value group. The final norm's gain and the unembedding turn that into
logits. Each norm's positive scale is left out, since it does not change which tokens come first, and so the result
needs no input; biases are left out too, since without a scale they have no size relative to v. A LayerNorm's mean is
subtracted. Where a family has norms behind the blocks (Gemma-2), their gains are part of v and of what attention
writes. A final soft-cap keeps the order.

The product W_O W_V is D x D and kept in the wide dtype; multiplied out with the unembedding it would be D x V, eight
times as large for Llama-2-7B, and in 16 bits not exact, while W_U as stored is (Lens splits the other factor in two).

Shape legend: K neuron, D model width, H query head, G key/value group, Z features of the groups (G * d_head), V
vocabulary, X group of tokens, N vectors, R rows that are looked at closely, T top tokens.
"""

from dataclasses import dataclass

import torch

from mathinterp.engine.batching import in_batches
from mathinterp.engine.lens.lens import Lens, norm_parts, wide_dtype
from mathinterp.models.anatomy import Anatomy

NO_CONCEPT = -1
CPU_LOGITS = 2**24  # held at once: 64 MiB
GPU_LOGITS = 2**28
GROUP = 32  # tokens whose maximum stands for them


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
    matrix_DD = norm.gain_D[:, None] * (value_ZD.T @ output_ZD)
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
    """

    def __init__(self, anatomy: Anatomy, concept_V: torch.Tensor, top: int):
        assert len(concept_V) == anatomy.shape.vocabulary > top > 0
        self.lens, self.top = Lens(anatomy), top
        self._concept_V = concept_V.to(anatomy.device)
        self._ids_C = (self._concept_V != NO_CONCEPT).nonzero()[:, 0]
        assert len(self._ids_C), "no token is a concept"
        on_gpu = anatomy.device.type == "cuda"
        self._at_once = max(1, (GPU_LOGITS if on_gpu else CPU_LOGITS) // anatomy.shape.vocabulary)

    @torch.inference_mode()
    def read(self, vectors_ND: torch.Tensor, every: bool = False) -> FirstTokens:
        """First tokens of the vectors that have a concept among them, or of ``every`` vector.

        Raises FloatingPointError naming the first vector that is not finite.
        """
        finite_N = vectors_ND.isfinite().all(dim=1)
        if not finite_N.all():
            raise FloatingPointError(f"vector {int(finite_N.long().argmin())} is NaN or infinite")
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []

        def run(start: int, stop: int) -> None:
            rows_R, ids_RT = self._read_block(vectors_ND[start:stop], every)
            parts.append((rows_R.cpu() + start, ids_RT.cpu()))

        self._at_once = in_batches(len(vectors_ND), self._at_once, run)
        return FirstTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _read_block(self, vectors_ND: torch.Tensor, every: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = self.lens.directions(vectors_ND)
        if every:
            return torch.arange(len(logits_NV)), top_ids(logits_NV, self.top)
        best_N1 = logits_NV[:, self._ids_C].amax(dim=1, keepdim=True)
        in_groups = logits_NV.shape[1] // GROUP * GROUP  # a rest that fills no group is left to the closer look
        highest_NX = logits_NV[:, :in_groups].unflatten(1, (GROUP, -1)).amax(dim=1)
        rows_R = ((highest_NX > best_N1).sum(dim=1) < self.top).nonzero()[:, 0]
        ids_RT = top_ids(logits_NV[rows_R], self.top)
        has_hit_R = (self._concept_V[ids_RT] != NO_CONCEPT).any(dim=1)
        return rows_R[has_hit_R], ids_RT[has_hit_R]


def top_ids(logits_RV: torch.Tensor, top: int) -> torch.Tensor:
    """Ids of each row's ``top`` largest logits, largest first, equal ones in ascending order: R T."""
    values_RS, ids_RS = logits_RV.topk(top + 1, dim=1)
    tied_R = (values_RS[:, 1:] == values_RS[:, :-1]).any(dim=1)
    ids_RT = ids_RS[:, :top]
    if tied_R.any():  # topk picks and orders equal values as it likes
        ids_RT[tied_R] = logits_RV[tied_R].sort(dim=1, descending=True, stable=True).indices[:, :top]
    return ids_RT


def concept_hits(ids_RT: torch.Tensor, concept_V: torch.Tensor, distinct: bool) -> torch.Tensor:
    """How many of each row's tokens are concepts, or how many ``distinct`` concepts they are: R."""
    found_RT = concept_V[ids_RT]
    is_hit_RT = found_RT != NO_CONCEPT
    if distinct:
        found_RT = found_RT.sort(dim=1).values
        is_hit_RT = found_RT != NO_CONCEPT
        is_hit_RT[:, 1:] &= found_RT[:, 1:] != found_RT[:, :-1]
    return is_hit_RT.sum(dim=1)
