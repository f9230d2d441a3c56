"""What a map says: AUROC of every heuristic, the one that explains it best, and shares of power, all units at once.

Shape legend: U unit, P pair, C heuristic, N partition, R sinusoid, S shuffle.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mathinterp.experiments.operand_map.grid import Grid, heuristics_of, sinusoids
from mathinterp.experiments.operand_map.tables import FAMILIES

UNITS_AT_ONCE = {"cpu": 512, "cuda": 2048}
ROUNDINGS = 4
MOSTLY = 0.75  # share of pairs
SAME = 1e-9  # AUROCs this close are equal


def centred_ranks(values_UP: torch.Tensor) -> torch.Tensor:
    """Each value's rank among its unit's, ties sharing their mean rank, less the mean of all ranks: float64."""
    count = values_UP.shape[1]
    sorted_UP, order_UP = values_UP.sort(dim=1)
    place_P = torch.arange(count, device=values_UP.device, dtype=torch.int32)
    begins_UP = torch.ones_like(sorted_UP, dtype=torch.bool)
    begins_UP[:, 1:] = sorted_UP[:, 1:] != sorted_UP[:, :-1]
    if begins_UP.all():
        twice_UP = (2 * place_P).expand_as(order_UP)
    else:
        ends_UP = begins_UP.roll(-1, dims=1)
        ends_UP[:, -1] = True
        first_UP = torch.where(begins_UP, place_P, 0).cummax(dim=1).values
        last_UP = torch.where(ends_UP, place_P, count - 1).flip(1).cummin(dim=1).values.flip(1)
        twice_UP = first_UP + last_UP
    ranks_UP = torch.empty(values_UP.shape, dtype=torch.float64, device=values_UP.device)
    return ranks_UP.scatter_(1, order_UP, (twice_UP - (count - 1)).double() / 2)


@dataclass(frozen=True)
class Measured:
    """What is said of U maps, by column of the table; NaN and -1 where a map is constant."""

    columns: dict[str, np.ndarray]
    best_U: np.ndarray  # heuristic


class Measures:
    """The heuristics and sinusoids of one grid, ready for maps whose pairs are in its order.

    A heuristic explains a unit as well as its AUROC says, or 1 less that where the unit is low: the share of (pair for
    which it holds, pair for which it does not) whose values are in order, ties counting half. The control is the
    largest AUROC of all heuristics where each pair has another pair's value, mean over ``shuffles`` draws. A map whose
    standard deviation is ROUNDINGS roundings of its root mean square in ``dtype``, or less, is constant: nothing
    explains it.
    """

    def __init__(self, grid: Grid, device: torch.device, dtype: torch.dtype, shuffles: int, seed: int):
        self.heuristics, self.rounding = heuristics_of(grid), torch.finfo(dtype).eps
        holds_CP = torch.from_numpy(self.heuristics.holds_CP).to(device).double()
        rng = np.random.default_rng(seed)
        self.holds_CP = holds_CP
        self.shuffled_SCP = [holds_CP[:, torch.from_numpy(rng.permutation(len(grid)))] for _ in range(shuffles)]
        count_C = holds_CP.sum(1)
        self.count_C, self.pairs_C = count_C, count_C * (len(grid) - count_C)
        self.preferred_C = (count_C <= MOSTLY * len(grid)).double()
        self.partition_C = torch.from_numpy(self.heuristics.partition_C).to(device)
        covered_N = torch.zeros(int(self.partition_C.max()) + 1, dtype=torch.float64, device=device)
        self.rest_N = len(grid) - covered_N.index_add_(0, self.partition_C, count_C)  # pairs of no class
        self.sinusoids = {name: torch.from_numpy(rows).to(device) for name, rows in sinusoids(grid).items()}

    @torch.inference_mode()
    def of(self, values_UP: torch.Tensor, terms: int = 1) -> Measured:
        """Of maps in any dtype; terms: numbers in the model's dtype that each value was summed from, in a wide one."""
        step = UNITS_AT_ONCE["cuda" if values_UP.is_cuda else "cpu"]
        parts = [self._part(rows_uP.contiguous(), self.rounding / terms**0.5) for rows_uP in values_UP.split(step)]
        joined = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
        return Measured(joined, joined.pop("best").astype(int))

    def _part(self, values_UP: torch.Tensor, rounding: float) -> dict[str, torch.Tensor]:
        wide_UP = values_UP.double()
        floor_U = ROUNDINGS * rounding * wide_UP.square().mean(1).sqrt()
        mean_U = wide_UP.mean(1)
        centred_UP = wide_UP - mean_U[:, None]
        square_U = centred_UP.square().sum(1)
        spread_U = (square_U / values_UP.shape[1]).sqrt()
        constant_U = spread_U <= floor_U
        square_U = square_U.masked_fill_(constant_U, torch.nan)
        found = {"mean": mean_U, "spread": spread_U}
        for name, rows_RP in self.sinusoids.items():
            found[name] = (centred_UP @ rows_RP.T).square().sum(1) / square_U
        sums_UC = centred_UP @ self.holds_CP.T
        found |= self._heuristic(centred_ranks(values_UP), self._between(sums_UC) / square_U[:, None])
        for name in ("auroc", "shuffled", *(f"auroc_{family}" for family in FAMILIES)):
            found[name] = found[name].masked_fill(constant_U, torch.nan)
        found["best"] = found["best"].masked_fill(constant_U, -1)
        return found

    def _between(self, sums_UC: torch.Tensor) -> torch.Tensor:
        """Sum of squares between the classes of each partition, U N; pairs of no class, which are few, are one more."""
        squares_UN = sums_UC.new_zeros(len(sums_UC), len(self.rest_N))
        sums_UN = torch.zeros_like(squares_UN)
        squares_UN.index_add_(1, self.partition_C, sums_UC.square() / self.count_C)
        sums_UN.index_add_(1, self.partition_C, sums_UC)
        rest_UN = (sums_UN.square() / self.rest_N.clamp(min=1)).masked_fill(self.rest_N == 0, 0)
        return squares_UN.add_(rest_UN)

    def _heuristic(self, ranks_UP: torch.Tensor, explained_UN: torch.Tensor) -> dict[str, torch.Tensor]:
        """AUROCs, and the heuristic of the largest.

        Of equal ones that whose partition explains most variance, then one that does not hold for most pairs ("low
        where a = b", not "high where a and b differ"), then one where the unit is high.
        """
        signed_UC = ranks_UP @ self.holds_CP.T / self.pairs_C  # AUROC - 1/2
        strength_UC = signed_UC.abs()
        explained_UC = explained_UN[:, self.partition_C]
        top_U = strength_UC.amax(1)
        rank_UC = explained_UC + SAME * (self.preferred_C + 0.01 * (signed_UC > 0))
        best_U = rank_UC.masked_fill(strength_UC < top_U[:, None] - SAME, -1).argmax(1)
        found = {"best": best_U, "auroc": 0.5 + top_U}
        found["high"] = signed_UC.gather(1, best_U[:, None])[:, 0] > 0
        found["explained"] = explained_UC.gather(1, best_U[:, None])[:, 0]
        shuffled = [(ranks_UP @ holds_CP.T / self.pairs_C).abs().amax(1) for holds_CP in self.shuffled_SCP]
        found["shuffled"] = 0.5 + torch.stack(shuffled).mean(0)
        for number, family in enumerate(FAMILIES):
            own = np.flatnonzero(self.heuristics.family_C == number)
            best = strength_UC[:, own].amax(1) if len(own) else torch.full_like(top_U, torch.nan)
            found[f"auroc_{family}"] = 0.5 + best
        return found
