"""The statistics of the views, a second time, slow and obvious, with scipy: docs/statistics.md in numbers.

Nothing here shares a formula with functions.sql: the risen share is found where a likelihood is largest, bounds by root
finding, Student's t by scipy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

Z_95 = float(stats.norm.ppf(0.975))


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
class Part:
    """One operation: shares of units that fell and rose, and the number of independent units they are worth."""

    prompts: int
    fell: float
    rose: float
    units: float

    @property
    def drop(self) -> float:
        return self.fell - self.rose


@dataclass(frozen=True)
class Effect:
    n: int
    baseline_accuracy: float
    accuracy: float
    drop: float
    logprob_change: float
    logprob_variance: float | None
    parts: tuple[Part, ...]

    @property
    def interval(self) -> tuple[float, float]:
        return score_interval(self.parts)

    @property
    def p_value(self) -> float:
        return score_p_value(self.parts)

    @property
    def relative_drop(self) -> float | None:
        return self.drop / self.baseline_accuracy if self.baseline_accuracy > 0 else None


def ratio_variance(x: Sequence[float], n: Sequence[float]) -> float:
    """Of sum x / sum n, clustered: each entry is a cluster."""
    x_i, n_i = np.array(x, float), np.array(n, float)
    rest = x_i - x_i.sum() / n_i.sum() * n_i
    return float(len(x_i) / (len(x_i) - 1) * (rest**2).sum() / n_i.sum() ** 2)


def part_of(fell: Sequence[float], rose: Sequence[float], n: Sequence[float]) -> Part:
    """Prompts with n units each, of which ``fell`` were lost and ``rose`` won."""
    prompts, total = len(n), sum(n)
    lost, won = sum(fell) / total, sum(rose) / total
    moved = sum(a != b for a, b in zip(fell, rose, strict=True))
    together = prompts * sum(k * k for k in n) / total**2  # of answers whose tokens are right or wrong together
    single = lost + won - (lost - won) ** 2  # variance of one unit's change
    found = together
    if prompts > 1 and single > 1e-12:
        changes = [a - b for a, b in zip(fell, rose, strict=True)]
        found = max(ratio_variance(changes, n) * prompts / single, prompts / total)
    ratio = (moved * min(found, 1.5 * together) + 4 * together) / (moved + 4) * (1 + 0.3 / (moved + 1))
    return Part(prompts, lost, won, prompts / ratio)


def unit_variance(part: Part, drop: float) -> float:
    """Of one unit's change if its true mean is ``drop``: shares that fall and rise maximize the likelihood."""
    low, high = max(0.0, -drop), (1 - drop) / 2

    def slope(rose: float) -> float:
        """Of the log-likelihood in the share that rises; it falls everywhere."""
        shares = [
            (part.rose, rose, 1),
            (part.fell, rose + drop, 1),
            (1 - part.rose - part.fell, 1 - 2 * rose - drop, -2),
        ]
        return sum(sign * seen / max(share, 1e-300) for seen, share, sign in shares if seen > 1e-15)

    inner = (low + (high - low) * 1e-12, high - (high - low) * 1e-12)
    if high - low < 1e-9 or slope(inner[0]) <= 0:
        rose = low
    elif slope(inner[1]) >= 0:
        rose = high
    else:
        rose = float(optimize.brentq(slope, *inner, xtol=1e-15))
    return max(2 * rose + drop - drop**2, 0.0)


def shifted(parts: Sequence[Part], shift: float) -> list[float]:
    """Each operation's drop moved by ``shift``, none beyond -1 or 1."""
    return [min(max(part.drop + shift, -1.0), 1.0) for part in parts]


def moved(parts: Sequence[Part], shift: float) -> float:
    """How far that moves the mean over operations."""
    return float(np.mean(shifted(parts, shift))) - float(np.mean([part.drop for part in parts]))


def mean_variance(parts: Sequence[Part], drop: float) -> float:
    """Of the mean over operations if each one's drop is moved by what takes the mean to ``drop`` where none is cut."""
    own = shifted(parts, drop - float(np.mean([part.drop for part in parts])))
    return sum(unit_variance(part, d) / part.units for part, d in zip(parts, own, strict=True)) / len(parts) ** 2


def score_p_value(parts: Sequence[Part]) -> float:
    seen = float(np.mean([part.drop for part in parts]))
    if abs(seen) < 1e-12:
        return 1.0
    shift = float(optimize.brentq(lambda shift: moved(parts, shift) + seen, -2.0, 2.0, xtol=1e-14))
    return float(2 * stats.norm.sf(abs(seen) / np.sqrt(mean_variance(parts, seen + shift))))


def score_interval(parts: Sequence[Part]) -> tuple[float, float]:
    """All drops that the score test does not refuse at 5 %."""
    seen = float(np.mean([part.drop for part in parts]))

    def refused(shift: float) -> float:
        return moved(parts, shift) ** 2 - Z_95**2 * mean_variance(parts, seen + shift)

    return seen + moved(parts, _edge(refused, 0.0, -2.0)), seen + moved(parts, _edge(refused, 0.0, 2.0))


@dataclass(frozen=True)
class Share:
    """One operation: the share of its units that are right, and the number of independent units they are worth."""

    right: float
    units: float


def share_of(hits: Sequence[float], n: Sequence[float]) -> Share:
    """Prompts with n units each, of which ``hits`` were right; the rarer prompts say how units hang together."""
    prompts, total = len(n), sum(n)
    right = sum(hits) / total
    telling = min(sum(h > 0 for h in hits), sum(h < k for h, k in zip(hits, n, strict=True)))
    together = prompts * sum(k * k for k in n) / total**2
    found = together
    if prompts > 1 and right * (1 - right) > 1e-12:
        found = max(ratio_variance(hits, n) * prompts / (right * (1 - right)), prompts / total)
    return Share(right, prompts * (telling + 4) / (telling * min(found, 1.5 * together) + 4 * together))


def share_interval(shares: Sequence[Share]) -> tuple[float, float]:
    """Of the mean over operations: all shares that Wilson's test, corrected for continuity, does not refuse at 5 %.

    Every operation's share is shifted by as much, none beyond 0 or 1.
    """
    seen = float(np.mean([share.right for share in shares]))
    step = sum(0.5 / share.units for share in shares) / len(shares) ** 2

    def own(shift: float) -> list[float]:
        return [min(max(share.right + shift, 0.0), 1.0) for share in shares]

    def refused(shift: float) -> float:
        right = own(shift)
        variance = sum(p * (1 - p) / share.units for p, share in zip(right, shares, strict=True)) / len(shares) ** 2
        return max(abs(float(np.mean(right)) - seen) - step, 0) ** 2 - Z_95**2 * variance

    low, high = (float(np.mean(own(_edge(refused, 0.0, side)))) for side in (-1.0, 1.0))
    return low, high


def _edge(refused: Callable[[float], float], inside: float, outside: float) -> float:
    if inside == outside or refused(outside) <= 0:
        return outside
    near = inside + (outside - inside) * 1e-9
    return inside if refused(near) > 0 else float(optimize.brentq(refused, near, outside, xtol=1e-12))


def student_interval(mean: float, variance: float, fewest: int) -> tuple[float, float]:
    half = float(stats.t.ppf(0.975, fewest - 1)) * float(np.sqrt(variance))
    return mean - half, mean + half


def student_p_value(mean: float, variance: float, fewest: int) -> float:
    return 1.0 if mean == 0 else float(2 * stats.t.sf(abs(mean) / np.sqrt(variance), fewest - 1))


def clustered_effect(units: Sequence[Unit], scoring: str = "token") -> Effect:
    """One operation's drop; ``units``: all scored tokens of its prompts, under one ablation."""
    prompts: dict[str, list[Unit]] = {}
    for unit in units:
        if scoring != "first_token" or unit.position == 0:
            prompts.setdefault(unit.prompt_id, []).append(unit)
    fell, rose, n, right = [], [], [], []
    for tokens in prompts.values():
        pairs = [(token.baseline_correct, token.correct) for token in tokens]
        if scoring == "exact_match":
            pairs = [(all(before for before, _ in pairs), all(after for _, after in pairs))]
        fell.append(sum(before and not after for before, after in pairs))
        rose.append(sum(after and not before for before, after in pairs))
        n.append(len(pairs))
        right.append(sum(before for before, _ in pairs))
    changes = [sum(token.logprob - token.baseline_logprob for token in tokens) for tokens in prompts.values()]
    part = part_of(fell, rose, n)
    return Effect(
        sum(n), sum(right) / sum(n), (sum(right) - sum(fell) + sum(rose)) / sum(n), part.drop, sum(changes) / sum(n),
        ratio_variance(changes, n) if len(n) > 1 else None, (part,),
    )  # fmt: skip


def effects_by_operation(units: Sequence[Unit], scoring: str = "token") -> dict[str, Effect]:
    """Operation -> effect of one ablated component, and 'all', their unweighted mean."""
    operations = sorted({unit.operation for unit in units})
    effects = {
        name: clustered_effect([unit for unit in units if unit.operation == name], scoring) for name in operations
    }
    every = list(effects.values())
    variances = [effect.logprob_variance for effect in every if effect.logprob_variance is not None]
    effects["all"] = Effect(
        sum(effect.n for effect in every),
        float(np.mean([effect.baseline_accuracy for effect in every])),
        float(np.mean([effect.accuracy for effect in every])),
        float(np.mean([effect.drop for effect in every])),
        float(np.mean([effect.logprob_change for effect in every])),
        sum(variances) / len(every) ** 2 if len(variances) == len(every) else None,
        tuple(part for effect in every for part in effect.parts),
    )
    return effects
