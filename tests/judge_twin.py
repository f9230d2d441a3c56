"""The judge of adaptive scans a second time: plain loops over exact fractions, in units of the effect D in [-1, 1].

Shares nothing with mathinterp/experiments/adaptive: the bets are written for D, not for (D + 1) / 2; the largest K of
e-BH is found by trying all; nothing is kept from look to look.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

BETS = (Fraction(15, 100), Fraction(1, 2), Fraction(99, 100))
SHARES = (Fraction(1, 7), Fraction(1, 7), Fraction(5, 7))
INFINITE = None  # an e-value against what is impossible


@dataclass
class Verdict:
    decision: int = 0
    exact: bool = False
    used: int = 0
    e_above: Fraction | None = Fraction(1)
    e_below: Fraction | None = Fraction(1)
    estimate: Fraction | None = None


def e_value(values: Sequence[Fraction], weights: Sequence[Fraction], mean: Fraction, side: int) -> Fraction | None:
    """Against "the mean of all is at most ``mean``" (side 1) or "at least" (-1); weights: of all, in order."""
    total = sum(weights)
    capital = list(SHARES)
    for place, value in enumerate(values):
        so_far = sum(weight * each for weight, each in zip(weights[:place], values[:place], strict=True))
        to_come = (total * mean - so_far) / sum(weights[place:])
        room = 1 + to_come if side == 1 else 1 - to_come
        gain = side * (value - to_come)
        if room < 0 or (room == 0 and gain > 0):
            return INFINITE
        for number, bet in enumerate(BETS):
            capital[number] *= 1 + bet * gain / room if room else 1 - bet
    return sum(capital, Fraction(0))


def e_bh(values: Sequence[Fraction | None], level: Fraction) -> set[int]:
    """Indices of the discoveries: the first K of the largest, K as large as can be."""
    for k in range(len(values), 0, -1):
        large = [i for i, e in enumerate(values) if e is INFINITE or e >= len(values) / (k * level)]
        if len(large) >= k:
            return set(large)
    return set()


def judge(
    threshold: Fraction, fdr: Fraction, values: Sequence[Sequence[Fraction]], looks: Sequence[int], seen: int,
    weights: Sequence[Fraction],
) -> list[Verdict]:  # fmt: skip
    found = [Verdict() for _ in values]
    total = sum(weights)
    for look in looks[:seen]:
        still_open = [node for node, verdict in enumerate(found) if verdict.decision == 0]
        for node in still_open:
            drawn, verdict = values[node][:look], found[node]
            weighed = sum(weight * value for weight, value in zip(weights[:look], drawn, strict=True))
            left = sum(weights[look:])
            verdict.used, verdict.estimate = look, weighed / (total - left)
            verdict.e_above = e_value(drawn, weights, threshold, 1)
            verdict.e_below = e_value(drawn, weights, threshold, -1)
            if (weighed - left) / total > threshold:
                verdict.exact, verdict.e_above, verdict.e_below = True, INFINITE, Fraction(0)
            if (weighed + left) / total <= threshold:
                verdict.exact, verdict.e_above, verdict.e_below = True, Fraction(0), INFINITE
        on_top = [
            verdict.e_above is INFINITE or (verdict.e_below is not INFINITE and verdict.e_above >= verdict.e_below)
            for verdict in found
        ]
        none = Fraction(0)
        above = e_bh([v.e_above if top else none for v, top in zip(found, on_top, strict=True)], fdr / 2)
        below = e_bh([none if top else v.e_below for v, top in zip(found, on_top, strict=True)], fdr / 2)
        for node in still_open:
            if node in above | below:
                found[node].decision = 1 if on_top[node] else -1
    return found
