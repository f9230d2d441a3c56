"""The statistics of the views, a second time, slow and obvious; and rank comparisons of components.

Knows numbers only. The SQL of views/ablated_*.sql and views/ablation_effects.sql must agree with these functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal


@dataclass(frozen=True)
class Unit:
    """One scored answer token of one prompt, without and with an ablation."""

    prompt_id: str
    position: int
    operation: str
    baseline_correct: bool
    correct: bool
    baseline_logprob: float = 0.0
    logprob: float = 0.0


@dataclass(frozen=True)
class Effect:
    """What an ablation costs over some prompts; accuracies are fractions, variance is that of ``drop``."""

    n: int
    baseline_accuracy: float
    accuracy: float
    drop: float
    variance: float | None  # None: a single prompt has none
    logprob_change: float
    moved: int  # prompts whose number of right units changed

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % normal interval of the drop."""
        if self.variance is None:
            return None
        half = Z_95 * math.sqrt(self.variance)
        return self.drop - half, self.drop + half

    @property
    def relative_drop(self) -> float | None:
        """drop / baseline accuracy; None where the baseline is never right."""
        return self.drop / self.baseline_accuracy if self.baseline_accuracy > 0 else None

    @property
    def p_value(self) -> float | None:
        """Two-sided normal p of drop = 0, at least 2^(1 - moved), as flipping signs would give; 1 where drop is 0."""
        if self.drop == 0:
            return 1.0
        if self.variance is None:
            return None
        normal = math.erfc(abs(self.drop) / math.sqrt(2 * self.variance)) if self.variance > 0 else 0.0
        return max(normal, 2.0 ** (1 - self.moved))


def clustered_effect(units: Sequence[Unit], scoring: str = "token") -> Effect:
    """Ratio estimator of one operation's drop, clustered by prompt.

    Args:
        units: all scored tokens of the operation's prompts, under one ablation.
        scoring: "token", "first_token" or "exact_match" (method.md section 1).
    drop = sum d_i / sum n_i; variance G/(G-1) * sum (d_i - drop n_i)^2 / (sum n_i)^2 over the G prompts.
    """
    prompts: dict[str, list[Unit]] = {}
    for unit in units:
        if scoring != "first_token" or unit.position == 0:
            prompts.setdefault(unit.prompt_id, []).append(unit)
    whole = scoring == "exact_match"
    count = [1 if whole else len(tokens) for tokens in prompts.values()]
    before = [(all if whole else sum)(token.baseline_correct for token in tokens) for tokens in prompts.values()]
    after = [(all if whole else sum)(token.correct for token in tokens) for tokens in prompts.values()]
    n_i, d_i = np.array(count, float), np.array(before, float) - np.array(after, float)
    total, clusters = n_i.sum(), len(prompts)
    drop = d_i.sum() / total
    residual = d_i - drop * n_i
    change = sum(token.logprob - token.baseline_logprob for tokens in prompts.values() for token in tokens)
    return Effect(
        n=int(total),
        baseline_accuracy=float(sum(before) / total),
        accuracy=float(sum(after) / total),
        drop=float(drop),
        variance=float(clusters / (clusters - 1) * (residual**2).sum() / total**2) if clusters > 1 else None,
        logprob_change=float(change / total),
        moved=int((d_i != 0).sum()),
    )


def macro_effect(effects: Sequence[Effect]) -> Effect:
    """Operation 'all': the unweighted mean over k operations, with variance sum(variance) / k^2."""
    variances = [effect.variance for effect in effects if effect.variance is not None]
    return Effect(
        n=sum(effect.n for effect in effects),
        baseline_accuracy=float(np.mean([effect.baseline_accuracy for effect in effects])),
        accuracy=float(np.mean([effect.accuracy for effect in effects])),
        drop=float(np.mean([effect.drop for effect in effects])),
        variance=sum(variances) / len(effects) ** 2 if len(variances) == len(effects) else None,
        logprob_change=float(np.mean([effect.logprob_change for effect in effects])),
        moved=sum(effect.moved for effect in effects),
    )


def effects_by_operation(units: Sequence[Unit], scoring: str = "token") -> dict[str, Effect]:
    """Operation -> effect of one ablated component, with 'all' added."""
    operations = sorted({unit.operation for unit in units})
    effects = {
        operation: clustered_effect([unit for unit in units if unit.operation == operation], scoring)
        for operation in operations
    }
    return {**effects, "all": macro_effect(list(effects.values()))}


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """q-values: the smallest false discovery rate at which each test is still called (Benjamini & Hochberg 1995)."""
    tests = len(p_values)
    q_values = [1.0] * tests
    smallest = 1.0
    for rank, index in reversed(list(enumerate(np.argsort(p_values, kind="stable"), start=1))):
        smallest = min(smallest, p_values[index] * tests / rank)
        q_values[index] = smallest
    return q_values


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN if one side is constant.

    Raises ValueError unless x and y have the same length of at least 2.
    """
    a, b = _mean_ranks(np.asarray(x, float)), _mean_ranks(np.asarray(y, float))
    if a.shape != b.shape or len(a) < 2:
        raise ValueError(f"two sequences of one length, at least 2, are needed, not {a.shape} and {b.shape}")
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else math.nan


def top_k_overlap(first: Sequence[Any], second: Sequence[Any], k: int) -> float:
    """Share of the first ``k`` of one ranking that are among the first ``k`` of another, 0..1.

    Raises ValueError unless both rankings have at least k >= 1 entries.
    """
    if not 1 <= k <= min(len(first), len(second)):
        raise ValueError(f"k = {k} is not between 1 and the lengths {len(first)} and {len(second)}")
    return len(set(first[:k]) & set(second[:k])) / k


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, group, size = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(size) - (size - 1) / 2)[group]
