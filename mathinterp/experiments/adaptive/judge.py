"""Which nodes' mean effect is above a threshold, judged at looks while prompts come in random order.

Bets on each node (betting.py) give an e-value against "at most the threshold" and one against "at least"; the e-BH
procedure over nodes (Wang & Ramdas, arXiv 2009.02824) decides. docs/statistics.md says what that promises, and why.
Knows numpy only: verdicts are a function of values, rule and looks. Legend: N node, P prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mathinterp.experiments.adaptive.betting import BETS_B, Block, Draws, FloatArray, interval, log_e

ABOVE, OPEN, NOT_ABOVE = 1, 0, -1
SAME = 2e-9  # a mean this close to the threshold is at the threshold, which is not above


@dataclass(frozen=True)
class Rule:
    """What is asked: is a mean in [-1, 1] above ``threshold``, at a false discovery rate of ``fdr / 2`` per side."""

    threshold: float
    fdr: float

    def __post_init__(self) -> None:
        assert 0 < self.threshold < 1, self
        assert 0 < self.fdr < 1, self


@dataclass(frozen=True, eq=False)
class Verdicts:
    """One entry per node; of an open node as of the last complete look.

    decision_N: 1 above the threshold, -1 not above, 0 open. exact_N: certain, whatever the prompts to come may say; the
    e-value is then infinite on the side decided, 0 on the other. used_N: prompts the decision used. estimate_N: their
    mean. low_N, high_N: a 1 - fdr interval, which holds at whatever look it is read; the mean itself where all prompts
    were used.
    """

    decision_N: npt.NDArray[np.int8]
    exact_N: npt.NDArray[np.bool_]
    used_N: npt.NDArray[np.int_]
    e_above_N: FloatArray
    e_below_N: FloatArray
    estimate_N: FloatArray
    rule: Rule
    _values_NP: FloatArray = field(repr=False)
    _draws: Draws = field(repr=False)

    @property
    def low_N(self) -> FloatArray:
        """Lower ends."""
        return self._intervals[0]

    @property
    def high_N(self) -> FloatArray:
        """Upper ends."""
        return self._intervals[1]

    @cached_property
    def _intervals(self) -> tuple[FloatArray, FloatArray]:
        """Computed when first asked for: the looks need no intervals."""
        low_N, high_N = np.full(len(self.used_N), -1.0), np.full(len(self.used_N), 1.0)
        for used in np.unique(self.used_N[self.used_N > 0]):
            nodes = np.flatnonzero(self.used_N == used)
            if used == self._values_NP.shape[1]:
                low_N[nodes] = high_N[nodes] = self.estimate_N[nodes]
            else:
                ends = interval((self._values_NP[nodes, :used] + 1) / 2, self._draws, self.rule.fdr / 2)
                low_N[nodes], high_N[nodes] = (2 * end - 1 for end in ends)
        # what decided a node refuses the threshold too; rounding of the ends must not hide that
        at_N = np.full(len(low_N), self.rule.threshold)
        low_N = np.where(self.decision_N == ABOVE, np.maximum(low_N, np.minimum(at_N, self.estimate_N)), low_N)
        high_N = np.where(self.decision_N == NOT_ABOVE, np.minimum(high_N, np.maximum(at_N, self.estimate_N)), high_N)
        return low_N, high_N


def judge(
    rule: Rule, values_NP: FloatArray, looks: Sequence[int], seen: int, weights_P: FloatArray | None = None
) -> Verdicts:
    """Replay the first ``seen`` looks.

    values_NP: each node's effect on each prompt, in [-1, 1], all prompts of the population in the order of the scan;
    NaN where it was not run. looks: prompts in before each look, the last one all of them. weights_P: the mean asked
    about is sum(weight value) / sum(weight), and prompts came in ``prompt_order``; all alike by default.
    """
    nodes, prompts = values_NP.shape
    assert list(looks) == sorted(set(looks)), looks
    assert 0 < looks[0] <= looks[-1] == prompts, (looks, prompts)
    assert 0 <= seen <= len(looks), (looks, seen)
    draws = Draws.of(np.ones(prompts) if weights_P is None else weights_P)
    replay = _Replay(rule, draws, nodes)
    for start, stop in zip([0, *looks], looks[:seen], strict=False):
        open_N = np.flatnonzero(replay.decision_N == OPEN)
        if not len(open_N):
            break
        values_np = values_NP[open_N, start:stop]
        assert not np.isnan(values_np).any(), f"open nodes were not run on the prompts from {start} to {stop}"
        assert np.abs(values_np).max() <= 1
        replay.take(open_N, (values_np + 1) / 2, start)
        replay.decide(open_N, stop)
    drawn_N = draws.total - np.array([draws.left(used) for used in replay.used_N])
    with np.errstate(over="ignore", invalid="ignore"):
        return Verdicts(
            decision_N=replay.decision_N, exact_N=replay.exact_N, used_N=replay.used_N,
            e_above_N=np.exp(replay.above_N), e_below_N=np.exp(replay.below_N),
            estimate_N=2 * replay.sum_N / drawn_N - 1, rule=rule, _values_NP=values_NP, _draws=draws,
        )  # fmt: skip


class _Replay:
    """State after some looks; log e-values of decided nodes stay as they were at the decision."""

    def __init__(self, rule: Rule, draws: Draws, nodes: int):
        self.rule, self.draws = rule, draws
        self.m = (rule.threshold + 1) / 2
        self.decision_N, self.exact_N = np.zeros(nodes, np.int8), np.zeros(nodes, bool)
        self.used_N, self.sum_N = np.zeros(nodes, int), np.zeros(nodes)
        self.above_N, self.below_N = np.zeros(nodes), np.zeros(nodes)
        self._above_NB, self._below_NB = np.zeros((nodes, len(BETS_B))), np.zeros((nodes, len(BETS_B)))

    def take(self, open_N: npt.NDArray[np.int_], x_np: FloatArray, start: int) -> None:
        """Bet on the prompts from ``start`` on."""
        block = Block.of(x_np, self.sum_N[open_N], self.draws, start)
        m_n = np.full(len(open_N), self.m)
        self._above_NB[open_N] += block.log_capital(m_n, against_less=True)
        self._below_NB[open_N] += block.log_capital(m_n, against_less=False)
        self.above_N[open_N], self.below_N[open_N] = log_e(self._above_NB[open_N]), log_e(self._below_NB[open_N])
        self.sum_N[open_N] = block.sum_N
        self.used_N[open_N] = start + x_np.shape[1]

    def decide(self, open_N: npt.NDArray[np.int_], stop: int) -> None:
        """What is certain first, then e-BH on each side, over all nodes."""
        least_n, most_n = self.sum_N[open_N], self.sum_N[open_N] + self.draws.left(stop)
        at_most = (self.m + SAME / 2) * self.draws.total
        for certain_n, right_N, wrong_N in (
            (least_n > at_most, self.above_N, self.below_N),
            (most_n <= at_most, self.below_N, self.above_N),
        ):
            nodes = open_N[certain_n]
            right_N[nodes], wrong_N[nodes], self.exact_N[nodes] = np.inf, -np.inf, True
        is_above_N = self.above_N >= self.below_N  # each node competes on one side: K counts what is decided there
        level = self.rule.fdr / 2
        found_N = discoveries(np.where(is_above_N, self.above_N, -np.inf), level)
        found_N |= discoveries(np.where(is_above_N, -np.inf, self.below_N), level)
        self.decision_N[open_N] = np.where(found_N, np.where(is_above_N, ABOVE, NOT_ABOVE), OPEN)[open_N]


def discoveries(log_e_N: FloatArray, level: float) -> npt.NDArray[np.bool_]:
    """E-BH: those of at least N / (K level), K being the largest number for which there are K such."""
    needed_K = np.log(len(log_e_N) / (np.arange(1, len(log_e_N) + 1) * level))
    enough = np.flatnonzero(np.sort(log_e_N)[::-1] >= needed_K)
    return log_e_N >= needed_K[enough[-1]] if len(enough) else np.zeros(len(log_e_N), bool)


def prompt_order(weights_P: FloatArray, seed: int) -> npt.NDArray[np.int_]:
    """A random order of the prompts: the next is each of the rest with a chance in proportion to its weight.

    Of equal weights every order is equally likely.
    """
    wait_P = np.random.default_rng(seed).exponential(size=len(weights_P)) / np.asarray(weights_P, float)
    return np.argsort(wait_P, kind="stable")


def accuracy_weights(units_P: Sequence[int], operations_P: Sequence[str]) -> FloatArray:
    """Weights under which the mean of (fell - rose) / units is the drop that ``head_effects`` states for 'all'.

    Accuracy is a share of the scored units of an operation, and the plain mean over operations (method.md section 1).
    units_P: units that count on each prompt; 1 for means over prompts, as in path effects.
    """
    of_operation: dict[str, int] = {}
    for units, operation in zip(units_P, operations_P, strict=True):
        of_operation[operation] = of_operation.get(operation, 0) + units
    return np.array([units / of_operation[operation] for units, operation in zip(units_P, operations_P, strict=True)])
