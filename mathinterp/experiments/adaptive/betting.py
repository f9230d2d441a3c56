"""Bets on the mean of a finite population, drawn without replacement: e-values, and the means that they refuse.

Values x lie in [0, 1]. Whoever believes that the mean of all is at most m expects, before each draw, a mean to come of
at most mu = (total m - sum so far) / weight to come, and must accept a bet that multiplies a capital of 1 by
1 + bet (x - mu) / mu. If m is true, capital grows to 1 / level with a chance of at most ``level``, at any time (Ville).
Sources: Waudby-Smith & Ramdas, arXiv 2006.04347 and 2010.09686; draws in proportion to weights: Shekhar, Xu, Lipton,
Liang & Ramdas, arXiv 2305.06884. Legend: N node, P prompt, B bet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BETS_B = np.array([0.15, 0.5, 0.99])  # parts of the capital that are staked each time
SHARES_B = np.array([1, 1, 5]) / 7  # of the first capital; most nodes do nothing, which the boldest bet shows soonest
_EDGE = 1e-12  # keeps the mean to come off 0 and 1, past which m is impossible
_TOGETHER = 16  # factors multiplied before a logarithm is taken: they neither overflow nor vanish
_HALVINGS = 16  # of an interval's end


@dataclass(frozen=True)
class Draws:
    """The order of draws: each one's weight, and the weight to come before it (P)."""

    weight_P: FloatArray
    to_come_P: FloatArray

    @classmethod
    def of(cls, weights_P: FloatArray) -> Draws:
        """All weights must be positive."""
        weight_P = np.asarray(weights_P, float)
        assert (weight_P > 0).all()
        return cls(weight_P, np.cumsum(weight_P[::-1])[::-1])

    @property
    def total(self) -> float:
        """Weight of the population."""
        return float(self.to_come_P[0])

    def left(self, drawn: int) -> float:
        """Weight to come after so many draws."""
        return float(self.to_come_P[drawn]) if drawn < len(self.to_come_P) else 0.0


@dataclass(frozen=True)
class Block:
    """Some draws of some nodes: x and the weighed sums before each draw (N, P of the block) and after the last (N)."""

    x_NP: FloatArray
    before_NP: FloatArray
    sum_N: FloatArray
    to_come_P: FloatArray
    total: float

    @classmethod
    def of(cls, x_NP: FloatArray, before_N: FloatArray | float, draws: Draws, start: int) -> Block:
        """before_N: the weighed sum of the draws before the block."""
        span = slice(start, start + x_NP.shape[1])
        weighed_NP = x_NP * draws.weight_P[span]
        after_NP = np.cumsum(weighed_NP, axis=1) + np.reshape(before_N, (-1, 1))
        return cls(x_NP, after_NP - weighed_NP, after_NP[:, -1], draws.to_come_P[span], draws.total)

    def log_capital(self, m_N: FloatArray, against_less: bool) -> FloatArray:
        """(N, B): log of what each bet multiplies its capital by, against "the mean is at most m", or at least m."""
        mu_NP = np.clip((self.total * m_N[:, None] - self.before_NP) / self.to_come_P, _EDGE, 1 - _EDGE)
        ratio_NP = self.x_NP / mu_NP if against_less else (1 - self.x_NP) / (1 - mu_NP)
        return np.stack([_log_product(1 - bet + bet * ratio_NP) for bet in BETS_B], axis=1)


def _log_product(factor_NP: FloatArray) -> FloatArray:
    whole = factor_NP.shape[1] // _TOGETHER * _TOGETHER
    parts = factor_NP[:, :whole].reshape(len(factor_NP), -1, _TOGETHER).prod(axis=2)
    return np.asarray(np.log(parts).sum(axis=1) + np.log(factor_NP[:, whole:]).sum(axis=1))


def log_e(log_capital_NB: FloatArray) -> FloatArray:
    """Log of the capital of all bets together: the e-value."""
    log_NB = np.log(SHARES_B) + log_capital_NB
    most_N = log_NB.max(axis=1)
    return np.asarray(most_N + np.log(np.exp(log_NB - most_N[:, None]).sum(axis=1)))


def interval(x_NP: FloatArray, draws: Draws, level: float) -> tuple[FloatArray, FloatArray]:
    """The means that capital of 1 / ``level`` refuses from neither side (N, N), after the draws that there are.

    Ends are rounded outwards, by up to 2^-16 of the way to what is possible at all; the mean so far is always inside.
    """
    block = Block.of(x_NP, 0.0, draws, 0)
    left = draws.left(x_NP.shape[1])
    mean_N = block.sum_N / (draws.total - left)
    ends = []
    for impossible_N, against_less in ((block.sum_N / draws.total, True), ((block.sum_N + left) / draws.total, False)):
        refused_N, kept_N = impossible_N, mean_N
        for _ in range(_HALVINGS):
            middle_N = (refused_N + kept_N) / 2
            is_N = log_e(block.log_capital(middle_N, against_less)) >= -np.log(level)
            refused_N, kept_N = np.where(is_N, middle_N, refused_N), np.where(is_N, kept_N, middle_N)
        ends.append(refused_N)
    return ends[0], ends[1]
