"""Which nodes' mean effect is above a threshold, judged at looks while prompts come in random order.

Betting without replacement (Waudby-Smith & Ramdas, arXiv 2006.04347, 2010.09686; weighted: Shekhar et al.,
arXiv 2305.06884) and e-BH over nodes (Wang & Ramdas, arXiv 2009.02824); docs/statistics.md explains both. Knows numpy
only: verdicts are a function of the rows, the rule and the looks. Legend: N node, P prompt, B bet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
ABOVE, OPEN, NOT_ABOVE = 1, 0, -1
BETS_B = np.array([0.05, 0.15, 0.3, 0.5, 0.75, 0.95])  # parts of the capital that are staked
PRIOR_B = np.full(len(BETS_B), 1 / len(BETS_B))  # the capital each starts with
SAME = 1e-9  # a mean this close to the threshold is at the threshold
_EDGE = 1e-12  # keeps a mean to come off 0 and 1; past them the node is certain


@dataclass(frozen=True)
class Rule:
    """What is asked: is a mean in [-1, 1] above ``threshold``, at a false discovery rate of ``fdr / 2`` per side."""

    threshold: float
    fdr: float


@dataclass(frozen=True)
class Verdicts:
    """One entry per node. Open nodes: e-values, estimate and interval after all complete looks.

    decision_N: 1 above the threshold, -1 not above, 0 open. exact_N: certain, whatever the prompts still to come would
    say; then e is infinite on the side decided. used_N: prompts the decision used. low_N, high_N: a 1 - fdr interval
    that holds at whatever look it is read; [mean, mean] where all prompts were used.
    """

    decision_N: npt.NDArray[np.int8]
    exact_N: npt.NDArray[np.bool_]
    used_N: npt.NDArray[np.int_]
    e_above_N: FloatArray
    e_below_N: FloatArray
    estimate_N: FloatArray
    low_N: FloatArray
    high_N: FloatArray


@dataclass(frozen=True)
class _Order:
    """Prompts in order: their weights, and the weight that is still to come before each."""

    weight_P: FloatArray
    to_come_P: FloatArray
    total: float

    def until(self, prompts: int) -> float:
        """Weight still to come after that many prompts."""
        return float(self.to_come_P[prompts]) if prompts < len(self.to_come_P) else 0.0


def judge(
    rule: Rule, values_NP: FloatArray, looks: Sequence[int], seen: int, weights_P: FloatArray | None = None
) -> Verdicts:
    """Replay the first ``seen`` looks.

    values_NP: the effect of each node on each prompt, in [-1, 1], all prompts of the population in the order of the
    scan; what was not run is NaN. looks: prompts in before each look, the last one all of them. weights_P: the
    population's mean is sum(weight * value) / sum(weight); prompts must then come in ``prompt_order``.
    """
    nodes, prompts = values_NP.shape
    assert 0 < rule.threshold < 1 and 0 < rule.fdr < 1, rule
    assert list(looks) == sorted(set(looks)) and looks[0] > 0 and looks[-1] == prompts and 0 <= seen <= len(looks)
    order = _order_of(np.ones(prompts) if weights_P is None else np.asarray(weights_P, float))
    m = (rule.threshold + 1) / 2
    x_NP = (values_NP + 1) / 2
    decision_N, exact_N = np.zeros(nodes, np.int8), np.zeros(nodes, bool)
    used_N, sum_N = np.zeros(nodes, int), np.zeros(nodes)
    above_NB, below_NB = (np.tile(np.log(PRIOR_B), (nodes, 1)) for _ in range(2))
    above_N, below_N = np.zeros(nodes), np.zeros(nodes)  # log e
    for start, stop in zip([0, *looks], looks[:seen], strict=False):
        open_N = np.flatnonzero(decision_N == OPEN)
        if not len(open_N):
            break
        block = slice(start, stop)
        x_np = x_NP[open_N, block]
        assert not np.isnan(x_np).any(), f"open nodes lack prompts of the look at {stop}"
        mean_np = _mean_to_come(x_np, sum_N[open_N], np.full(len(open_N), m), order, block)
        above_NB[open_N] += _log_capital(x_np, mean_np)
        below_NB[open_N] += _log_capital(1 - x_np, 1 - mean_np)
        above_N[open_N], below_N[open_N] = _log_sum(above_NB[open_N]), _log_sum(below_NB[open_N])
        sum_N[open_N] += x_np @ order.weight_P[block]
        used_N[open_N] = stop
        surely_above_n = sum_N[open_N] / order.total > m + SAME
        surely_not_n = (sum_N[open_N] + order.until(stop)) / order.total <= m + SAME
        for sure_n, won_N, lost_N in ((surely_above_n, above_N, below_N), (surely_not_n, below_N, above_N)):
            won_N[open_N[sure_n]], lost_N[open_N[sure_n]] = np.inf, -np.inf
        exact_N[open_N] = surely_above_n | surely_not_n
        is_above_N = _discoveries(above_N, rule.fdr / 2)
        is_below_N = _discoveries(below_N, rule.fdr / 2)
        side_N = np.where(above_N >= below_N, ABOVE, NOT_ABOVE)
        decision_N[open_N] = np.where(is_above_N | is_below_N, side_N, OPEN)[open_N]
    estimate_N, low_N, high_N = _intervals(rule, x_NP, used_N, sum_N, decision_N, order)
    with np.errstate(over="ignore"):
        e_above_N, e_below_N = np.exp(above_N), np.exp(below_N)
    return Verdicts(decision_N, exact_N, used_N, e_above_N, e_below_N, estimate_N, low_N, high_N)


def prompt_order(weights_P: FloatArray, seed: int) -> npt.NDArray[np.int_]:
    """A random order of the prompts: the next is each of the rest with a chance in proportion to its weight.

    Of equal weights every order is equally likely.
    """
    wait_P = np.random.default_rng(seed).exponential(size=len(weights_P)) / np.asarray(weights_P, float)
    return np.argsort(wait_P, kind="stable")


def accuracy_weights(units_P: Sequence[int], operations_P: Sequence[str]) -> FloatArray:
    """Weights under which the mean of (fell - rose) / units is the drop of ``head_effects``, operation 'all'.

    Accuracy is a share of scored units inside an operation and the plain mean over operations. units_P: units that count
    on each prompt. For means over prompts, as in path effects, all units are 1.
    """
    of_operation: dict[str, int] = {}
    for units, operation in zip(units_P, operations_P, strict=True):
        of_operation[operation] = of_operation.get(operation, 0) + units
    return np.array([units / of_operation[operation] for units, operation in zip(units_P, operations_P, strict=True)])


def _order_of(weight_P: FloatArray) -> _Order:
    assert (weight_P > 0).all()
    return _Order(weight_P, np.cumsum(weight_P[::-1])[::-1], float(weight_P.sum()))


def _mean_to_come(x_np: FloatArray, sum_n: FloatArray, m_n: FloatArray, order: _Order, block: slice) -> FloatArray:
    """Before each prompt of the block: the mean of those to come, if the mean of all is ``m``."""
    weighed_np = x_np * order.weight_P[block]
    before_np = sum_n[:, None] + np.cumsum(weighed_np, axis=1) - weighed_np
    mean_np = (order.total * m_n[:, None] - before_np) / order.to_come_P[block]
    return np.asarray(np.clip(mean_np, _EDGE, 1 - _EDGE))


def _log_capital(x_np: FloatArray, mean_np: FloatArray) -> FloatArray:
    """(n, B): log of the product of 1 + bet * (x - mean) / mean over the block."""
    ratio_np = x_np / mean_np
    return np.stack([_log_product(1 - bet + bet * ratio_np) for bet in BETS_B], axis=1)


def _log_product(factor_np: FloatArray, together: int = 16) -> FloatArray:
    """Log of the product over prompts: 16 at a time, which neither overflow nor vanish."""
    whole = factor_np.shape[1] // together * together
    parts = factor_np[:, :whole].reshape(len(factor_np), -1, together).prod(axis=2)
    return np.asarray(np.log(parts).sum(axis=1) + np.log(factor_np[:, whole:]).sum(axis=1))


def _log_sum(log_NB: FloatArray) -> FloatArray:
    most_N = log_NB.max(axis=1)
    return np.asarray(most_N + np.log(np.exp(log_NB - most_N[:, None]).sum(axis=1)))


def _discoveries(log_e_N: FloatArray, level: float) -> npt.NDArray[np.bool_]:
    """E-BH: those at least N / (K level), K the largest number for which there are K such."""
    nodes = len(log_e_N)
    needed_K = np.log(nodes / (np.arange(1, nodes + 1) * level))
    enough = np.flatnonzero(np.sort(log_e_N)[::-1] >= needed_K)
    return log_e_N >= needed_K[enough[-1]] if len(enough) else np.zeros(nodes, bool)


def _intervals(
    rule: Rule, x_NP: FloatArray, used_N: npt.NDArray[np.int_], sum_N: FloatArray, decision_N: npt.NDArray[np.int8],
    order: _Order,
) -> tuple[FloatArray, FloatArray, FloatArray]:  # fmt: skip
    """Mean of what was used, and every mean that neither side refuses at fdr / 2, in units of the effect."""
    estimate_N, low_N, high_N = (np.full(len(x_NP), np.nan) for _ in range(3))
    for used in np.unique(used_N[used_N > 0]):
        n = np.flatnonzero(used_N == used)
        left = order.until(used)
        estimate_N[n] = sum_N[n] / (order.total - left)
        if used == x_NP.shape[1]:
            low_N[n] = high_N[n] = estimate_N[n]
            continue
        x_np = x_NP[n, :used]
        least_n, most_n = sum_N[n] / order.total, (sum_N[n] + left) / order.total
        low_N[n] = _refused_until(x_np, least_n, estimate_N[n], rule.fdr / 2, order)
        high_N[n] = 1 - _refused_until(1 - x_np, 1 - most_n, 1 - estimate_N[n], rule.fdr / 2, order)
    estimate_N, low_N, high_N = (2 * each - 1 for each in (estimate_N, low_N, high_N))
    low_N = np.where(decision_N == ABOVE, np.maximum(low_N, np.minimum(rule.threshold, estimate_N)), low_N)
    high_N = np.where(decision_N == NOT_ABOVE, np.minimum(high_N, np.maximum(rule.threshold, estimate_N)), high_N)
    return estimate_N, low_N, high_N


def _refused_until(
    x_np: FloatArray, least_n: FloatArray, most_n: FloatArray, level: float, order: _Order
) -> FloatArray:
    """The largest mean in [least, most] that is refused with capital of 1 / level, which falls as the mean rises."""
    low_n, high_n = least_n.copy(), most_n.copy()
    for _ in range(24):
        middle_n = (low_n + high_n) / 2
        mean_np = _mean_to_come(x_np, np.zeros(len(x_np)), middle_n, order, slice(0, x_np.shape[1]))
        refused_n = _log_sum(np.log(PRIOR_B) + _log_capital(x_np, mean_np)) >= -np.log(level)
        low_n, high_n = np.where(refused_n, middle_n, low_n), np.where(refused_n, high_n, middle_n)
    return low_n
