"""How two sets of effects of the same nodes on the same prompts agree, and how surely: plain numbers.

Shape legend: N node, P prompt, B bootstrap draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

KS = (5, 10, 32)


@dataclass(frozen=True)
class Agreement:
    """One measure. error: its deviation over bootstrap draws of prompts; None with one prompt or in few draws."""

    measure: str
    k: int | None
    value: float
    error: float | None


def agreements(
    exact_NP: np.ndarray, other: np.ndarray, *, ks: Sequence[int] = KS, draws: int = 200, seed: int = 0
) -> list[Agreement]:
    """Measures of ``LEAGUE_SCORES``; those that are not defined (of effects that are all alike) are left out.

    Args:
        other: N P; or N, scores of size, of no sign and no prompt (a learned mask's).
        ks: those below N count.
    """
    nodes, prompts = exact_NP.shape
    counts_BP = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)
    weights_BP = np.concatenate([np.full((1, prompts), 1 / prompts), counts_BP / prompts])  # the first row: all prompts
    exact_BN = weights_BP @ exact_NP.T
    signed = other.ndim == 2
    other_BN = weights_BP @ other.T if signed else np.tile(other, (len(weights_BP), 1))
    found: dict[tuple[str, int | None], np.ndarray] = {}
    if signed:
        found["spearman", None] = correlations(ranks(exact_BN), ranks(other_BN))
        found["kendall", None] = np.array([kendall(*means) for means in zip(exact_BN, other_BN, strict=True)])
    sizes = np.abs(exact_BN), np.abs(other_BN) if signed else other_BN
    found["spearman_absolute", None] = correlations(*map(ranks, sizes))
    for k in ks:
        if k < nodes:
            found["overlap", k] = overlaps(*sizes, k)
    if signed:
        alone_P = correlations(exact_NP.T, other.T)
        known_P = np.isfinite(alone_P)
        if known_P.any():
            shares_BP = weights_BP[:, known_P]
            total_B = shares_BP.sum(1)
            found["prompt_correlation", None] = shares_BP @ alone_P[known_P] / np.where(total_B > 0, total_B, np.nan)
    return [
        Agreement(measure, k, float(value_B[0]), _error(value_B[1:]) if prompts > 1 else None)
        for (measure, k), value_B in found.items()
        if np.isfinite(value_B[0])
    ]


def _error(value_B: np.ndarray) -> float | None:
    """Standard deviation over the draws in which the measure is defined; None if it is not in half of them."""
    known_B = value_B[np.isfinite(value_B)]
    return float(np.std(known_B)) if 2 * len(known_B) >= len(value_B) else None


def ranks(values_BN: np.ndarray) -> np.ndarray:
    """Ranks in each row; ties have their mean."""
    return pd.DataFrame(values_BN).rank(axis=1).to_numpy()


def correlations(one_BN: np.ndarray, other_BN: np.ndarray) -> np.ndarray:
    """Pearson's, row by row: B; NaN where a row is constant."""
    one, other = (values - values.mean(1, keepdims=True) for values in (one_BN, other_BN))
    sizes = np.sqrt((one**2).sum(1) * (other**2).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: np.ndarray = np.where(sizes > 0, (one * other).sum(1) / sizes, np.nan)
    return found


def kendall(one_N: np.ndarray, other_N: np.ndarray) -> float:
    """tau-b: concordant minus discordant pairs of nodes, over the geometric mean of the pairs that are no ties."""
    one, other = (np.sign(values[:, None] - values[None, :]) for values in (one_N, other_N))
    untied = np.sqrt(np.abs(one).sum() * np.abs(other).sum())
    return float((one * other).sum() / untied) if untied else float("nan")


def overlaps(one_BN: np.ndarray, other_BN: np.ndarray, k: int) -> np.ndarray:
    """Share of the k largest of each row that are among the k largest of the other, expected over the order of ties."""
    found: np.ndarray = (among_first(one_BN, k) * among_first(other_BN, k)).sum(1) / k
    return found


def among_first(values_BN: np.ndarray, k: int) -> np.ndarray:
    """1 for the k largest of each row, else 0; of values that tie for the last places, each has an equal part."""
    last_B1 = -np.sort(-values_BN, axis=1)[:, k - 1 : k]
    above, tied = values_BN > last_B1, values_BN == last_B1
    left_B1 = k - above.sum(1, keepdims=True)
    part: np.ndarray = above + tied * (left_B1 / tied.sum(1, keepdims=True))
    return part
