"""Products on half-precision tensor cores that keep float32's order: the larger part first, the rest where it decides.

A matrix is the sum of two half-precision ones: ``high``, the matrix rounded, and ``low``, what was lost, rounded; they
keep 16 bits of each number in bfloat16 instead of 8. A product of two such matrices is ``high @ high`` and a rest that
is no longer than the factors' rows let it be (Cauchy-Schwarz). Whoever compares products needs the rest only where
the comparison is closer than that limit. All products are summed in float32.

Shape legend: N rows, D columns that are summed over, V rows of the other matrix (tokens), R and C chosen ones of N and
V, F factors of the limit (1 or 2), S rows of a block.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

SLACK = 0.01  # of the limit: more than the rounding of rest and lengths; D * 2**-23 is .0005 for D = 4096
ROUNDING = 2**-21  # relative; a sum of two float32 numbers is off by less
PIECES = 3  # half-precision matrices whose sum is a float32 matrix, but for its last bits
BLOCK = 2**28  # numbers of a product that are held in float32 at once


@dataclass(frozen=True)
class Halves:
    """A matrix as ``high + low``; low is None where nothing was lost."""

    high_ND: torch.Tensor
    low_ND: torch.Tensor | None

    @staticmethod
    def of(rows_ND: torch.Tensor, dtype: torch.dtype) -> "Halves":
        """Split a float32 matrix; one of that half-precision dtype is all ``high``."""
        if rows_ND.dtype == dtype:
            return Halves(rows_ND, None)
        high_ND = rows_ND.to(dtype)
        low_ND = (rows_ND - high_ND).to(dtype)
        return Halves(high_ND, low_ND if low_ND.any() else None)

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of each row of ``high`` and of ``low``: N."""
        return _lengths(self.high_ND), None if self.low_ND is None else _lengths(self.low_ND)

    def __getitem__(self, rows_R: torch.Tensor) -> "Halves":
        """Some rows."""
        return Halves(self.high_ND[rows_R], None if self.low_ND is None else self.low_ND[rows_R])


class HalvesProduct:
    """``left @ right.T``: ``first_NV`` at once, the rest on demand."""

    def __init__(self, left: Halves, right: Halves, right_lengths: tuple[torch.Tensor, torch.Tensor | None]):
        """right_lengths: ``right.lengths()``, which serve many products."""
        self._left, self._right, self._right_lengths = left, right, right_lengths
        self.first_NV = summed_in_float32(left.high_ND, right.high_ND)

    @property
    def exact(self) -> bool:
        """Whether the first product is all."""
        return self._left.low_ND is None and self._right.low_ND is None

    @cached_property
    def limit(self) -> tuple[torch.Tensor, torch.Tensor]:
        """N F and F V, whose product is above the rest's size, entry by entry."""
        (left_high_N, left_low_N), (right_high_V, right_low_V) = self._left.lengths(), self._right_lengths
        factors = [(left_low_N, right_high_V), (left_high_N, right_low_V)]
        kept = [(left_N, right_V) for left_N, right_V in factors if left_N is not None and right_V is not None]
        left_NF = torch.stack([left_N for left_N, _ in kept], dim=1)
        return (1 + SLACK) * left_NF, torch.stack([right_V for _, right_V in kept])

    def reach(self, columns_C: torch.Tensor) -> torch.Tensor:
        """Some columns, whole, and a little more: not below what ``rows`` gives for them, however it rounds: N C."""
        limit_NF, limit_FV = self.limit
        whole_NC = self._completed(self.first_NV[:, columns_C], self._left, self._right[columns_C])
        return whole_NC + SLACK * (limit_NF @ limit_FV[:, columns_C]) + ROUNDING * whole_NC.abs()

    def rows(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Some rows, whole: R V."""
        return self._completed(self.first_NV[rows_R], self._left[rows_R], self._right)

    def whole(self) -> torch.Tensor:
        """Every row, whole; ``first_NV`` is overwritten: N V."""
        return self._completed(self.first_NV, self._left, self._right)

    @staticmethod
    def _completed(first: torch.Tensor, left: Halves, right: Halves) -> torch.Tensor:
        """Adds the rest in place; low @ low is below what two halves keep."""
        if left.low_ND is not None:
            _add(first, left.low_ND, right.high_ND)
        if right.low_ND is not None:
            _add(first, left.high_ND, right.low_ND)
        return first


def summed_in_float32(left_ND: torch.Tensor, right_VD: torch.Tensor) -> torch.Tensor:
    """``left @ right.T`` of half-precision matrices: N V, float32."""
    if not left_ND.is_cuda:
        return left_ND.float() @ right_VD.float().T
    return torch.mm(left_ND, right_VD.T, out_dtype=torch.float32)


def product_in_halves(weight_VD: torch.Tensor, matrix_DD: torch.Tensor) -> Halves:
    """``weight @ matrix.T`` of a half-precision weight and a float32 matrix, split; up to a power of two.

    The power of two keeps float16 within its range. Rows of the weight are multiplied in blocks.
    """
    exponent = matrix_DD.abs().max().frexp().exponent
    left = torch.ldexp(matrix_DD, -exponent)
    pieces = []
    for _ in range(PIECES):
        pieces.append(left.to(weight_VD.dtype))
        left = left - pieces[-1]
    high_VD = torch.empty(len(weight_VD), len(matrix_DD), dtype=weight_VD.dtype, device=weight_VD.device)
    low_VD = torch.empty_like(high_VD)
    at_once = max(1, BLOCK // len(matrix_DD))
    for start in range(0, len(weight_VD), at_once):
        block = slice(start, start + at_once)
        sums_SD = summed_in_float32(weight_VD[block], pieces[-1])
        for piece_DD in reversed(pieces[:-1]):
            sums_SD += summed_in_float32(weight_VD[block], piece_DD)
        high_VD[block] = sums_SD
        low_VD[block] = sums_SD - high_VD[block]
    return Halves(high_VD, low_VD if low_VD.any() else None)


def _add(sums_RV: torch.Tensor, left_RD: torch.Tensor, right_VD: torch.Tensor) -> None:
    """Add a product in blocks of rows: a second one as large as the first would double the memory."""
    at_once = max(1, BLOCK // len(right_VD))
    for sums_SV, left_SD in zip(sums_RV.split(at_once), left_RD.split(at_once), strict=True):
        sums_SV += summed_in_float32(left_SD, right_VD)


def _lengths(rows_ND: torch.Tensor) -> torch.Tensor:
    lengths_N: torch.Tensor = torch.linalg.vector_norm(rows_ND, dim=1, dtype=torch.float32)
    return lengths_N
