"""Do the intervals and p-values hold what they say? Simulated prompts with a known truth.

    python benchmarks/coverage.py                # 4,000 draws a case, some minutes on one core
    python benchmarks/coverage.py --draws 500    # quick and rough

Prints, for the definitions of docs/statistics.md (``score``, ``student``) and for those they replaced (``normal``): the
coverage of nominal 95 % intervals (mean and worst case), how often a nominal 5 % test errs without an effect (worst
case), and, over 64 heads at a nominal rate of 5 %, false discoveries and power. Knows numpy and scipy; needs no store.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Row = dict[str, float | str]
Rates = dict[str, list[float]]
Z_95 = float(stats.norm.ppf(0.975))
PROMPTS = (8, 12, 20, 50, 100, 400)  # per operation
DROPS, RISEN = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5), (0.0, 0.02, 0.1, 0.25)
TOKENS = ((1,), (2,), (3,), (1, 2, 3))  # per prompt, in turn
HEADS, TRUE_HEADS = 64, 8


@dataclass(frozen=True)
class Drawn:
    """What a view keeps of one operation, for many draws (R): score_part in store/views/functions.sql."""

    drop_R: Floats
    fell_R: Floats
    rose_R: Floats
    units_R: Floats
    variance_R: Floats  # of the drop, clustered by prompt
    moved_R: Floats
    prompts: int


def draw(
    random: np.random.Generator,
    draws: int,
    prompts: int,
    tokens: Sequence[int],
    fell: float,
    rose: float,
    together: float,
) -> Drawn:
    """Answers of ``tokens`` tokens; with probability ``together`` all tokens of a prompt share their luck."""
    n_P = np.array([tokens[number % len(tokens)] for number in range(prompts)], float)
    luck_RPT = random.random((draws, prompts, max(tokens)))
    shared_RP1 = random.random((draws, prompts, 1)) < together
    luck_RPT = np.where(shared_RP1, luck_RPT[..., :1], luck_RPT)
    there_PT = np.arange(max(tokens)) < n_P[:, None]
    fell_RP = ((luck_RPT < fell) & there_PT).sum(-1).astype(float)
    rose_RP = ((luck_RPT >= fell) & (luck_RPT < fell + rose) & there_PT).sum(-1).astype(float)
    return summarized(fell_RP, rose_RP, n_P)


def summarized(fell_RP: Floats, rose_RP: Floats, n_P: Floats) -> Drawn:
    """The part of each draw."""
    prompts, total = len(n_P), n_P.sum()
    fell_R, rose_R = fell_RP.sum(1) / total, rose_RP.sum(1) / total
    drop_R = fell_R - rose_R
    rest_RP = fell_RP - rose_RP - drop_R[:, None] * n_P
    variance_R = prompts / (prompts - 1) * (rest_RP**2).sum(1) / total**2
    moved_R = (fell_RP != rose_RP).sum(1).astype(float)
    together = prompts * (n_P**2).sum() / total**2
    single_R = fell_R + rose_R - drop_R**2
    found_R = np.full_like(drop_R, together)
    some_R = single_R > 1e-12
    found_R[some_R] = np.maximum(variance_R[some_R] * prompts / single_R[some_R], prompts / total)
    ratio_R = (moved_R * np.minimum(found_R, 1.5 * together) + 4 * together) / (moved_R + 4) * (1 + 0.3 / (moved_R + 1))
    return Drawn(drop_R, fell_R, rose_R, prompts / ratio_R, variance_R, moved_R, prompts)


# ---- the two procedures: is the true value inside the interval, and the p-value of no effect ----


def score_variance(parts: Sequence[Drawn], drop_R: Floats) -> Floats:
    """Variance of the mean over operations if its true value is ``drop_R`` (Tango 1998, shifted alike everywhere)."""
    seen_R = np.mean([part.drop_R for part in parts], axis=0)
    total_R = np.zeros_like(seen_R)
    for part in parts:
        own_R = np.clip(part.drop_R + drop_R - seen_R, -1, 1)
        linear_R = part.fell_R + part.rose_R - (2 - part.fell_R + part.rose_R) * own_R
        root_R = np.sqrt(np.maximum(linear_R**2 + 8 * part.rose_R * own_R * (1 - own_R), 0))
        risen_R = np.clip((linear_R + root_R) / 4, np.maximum(0, -own_R), np.maximum((1 - own_R) / 2, 0))
        total_R += np.maximum(2 * risen_R + own_R - own_R**2, 0) / part.units_R
    return np.asarray(total_R / len(parts) ** 2)


def score_holds(parts: Sequence[Drawn], truth: float) -> npt.NDArray[np.bool_]:
    seen_R = np.mean([part.drop_R for part in parts], axis=0)
    return np.asarray((seen_R - truth) ** 2 <= Z_95**2 * score_variance(parts, np.full_like(seen_R, truth)) + 1e-12)


def score_p(parts: Sequence[Drawn]) -> Floats:
    seen_R = np.mean([part.drop_R for part in parts], axis=0)
    variance_R = np.maximum(score_variance(parts, np.zeros_like(seen_R)), 1e-300)
    return np.where(np.abs(seen_R) < 1e-12, 1.0, 2 * stats.norm.sf(np.abs(seen_R) / np.sqrt(variance_R)))


def normal_holds(parts: Sequence[Drawn], truth: float) -> npt.NDArray[np.bool_]:
    """The definition before: a normal interval on the cluster-robust variance."""
    seen_R = np.mean([part.drop_R for part in parts], axis=0)
    variance_R = sum(part.variance_R for part in parts) / len(parts) ** 2
    return np.asarray(np.abs(seen_R - truth) <= Z_95 * np.sqrt(variance_R) + 1e-12)


def normal_p(parts: Sequence[Drawn]) -> Floats:
    """The definition before: normal, but at least 2^(1 - moved prompts)."""
    seen_R = np.mean([part.drop_R for part in parts], axis=0)
    variance_R = np.maximum(sum(part.variance_R for part in parts) / len(parts) ** 2, 1e-300)
    least_R = 2.0 ** (1 - sum(part.moved_R for part in parts))
    p_R = np.maximum(2 * stats.norm.sf(np.abs(seen_R) / np.sqrt(variance_R)), least_R)
    return np.where(np.abs(seen_R) < 1e-12, 1.0, p_R)


Holds = Callable[[Sequence[Drawn], float], npt.NDArray[np.bool_]]
PROCEDURES: dict[str, tuple[Holds, Callable[[Sequence[Drawn]], Floats]]] = {
    "normal (before)": (normal_holds, normal_p),
    "score": (score_holds, score_p),
}


# ---- accuracies ----


def cases() -> Iterator[tuple[Sequence[int], float, float, float]]:
    """Tokens per prompt, how often they share their luck, true drop, share that rises."""
    for tokens, together, drop, risen in itertools.product(TOKENS, (0.0, 0.5, 1.0), DROPS, RISEN):
        if (tokens != (1,) or not together) and drop + 2 * risen <= 1:
            yield tokens, together, drop, risen


def coverage(prompts: int, draws: int, seed: int = 0) -> list[Row]:
    """Mean and worst coverage over all cases of one operation, and the worst rate of false alarms."""
    random = np.random.default_rng(seed)
    inside: Rates = {}
    alarms: Rates = {}
    for tokens, together, drop, risen in cases():
        for sign in (1, -1) if drop else (1,):
            fell, rose = (drop + risen, risen) if sign > 0 else (risen, drop + risen)
            part = draw(random, draws, prompts, tokens, fell, rose, together)
            for name, (holds, p_of) in PROCEDURES.items():
                inside.setdefault(name, []).append(float(holds([part], sign * drop).mean()))
                if drop == 0:
                    alarms.setdefault(name, []).append(float((p_of([part]) < 0.05).mean()))
    return [
        {
            "procedure": name, "prompts": prompts, "cases": len(inside[name]), "coverage": float(np.mean(inside[name])),
            "worst coverage": min(inside[name]), "worst false alarms": max(alarms[name]),
        }
        for name in PROCEDURES
    ]  # fmt: skip


def coverage_of_all(prompts: int, draws: int, seed: int = 0) -> list[Row]:
    """The mean over four operations with unlike drops."""
    random = np.random.default_rng(seed)
    inside: Rates = {}
    alarms: Rates = {}
    drops = [
        (0, 0, 0, 0),
        (0.05,) * 4,
        (0.2, 0, 0, 0),
        (0.5, 0.5, 0, 0),
        (0.3, 0.1, 0.05, 0),
        (0.5, -0.1, 0, 0),
        (0.5,) * 4,
    ]
    for tokens, true, risen in itertools.product(((1,), (3,), (1, 2, 3)), drops, (0.0, 0.05, 0.2)):
        shares = [(max(d, 0) + risen, max(-d, 0) + risen) for d in true]
        parts = [draw(random, draws, prompts, tokens, fell, rose, 0.5) for fell, rose in shares]
        for name, (holds, p_of) in PROCEDURES.items():
            inside.setdefault(name, []).append(float(holds(parts, float(np.mean(true))).mean()))
            if not any(true):
                alarms.setdefault(name, []).append(float((p_of(parts) < 0.05).mean()))
    return [
        {
            "procedure": f"{name}, mean of 4 operations", "prompts": prompts, "cases": len(inside[name]),
            "coverage": float(np.mean(inside[name])), "worst coverage": min(inside[name]),
            "worst false alarms": max(alarms[name]),
        }
        for name in PROCEDURES
    ]  # fmt: skip


def discoveries(prompts: int, draws: int, drop: float = 0.3, seed: int = 0) -> list[Row]:
    """64 heads over four operations, 8 of which truly cost ``drop``: false discovery rate and power at q < .05."""
    random = np.random.default_rng(seed)
    found: list[Row] = []
    for risen in (0.01, 0.05, 0.15):
        nulls = [draw(random, draws * (HEADS - TRUE_HEADS), prompts, (1, 2, 3), risen, risen, 0.5) for _ in range(4)]
        trues = [draw(random, draws * TRUE_HEADS, prompts, (1, 2, 3), drop + risen, risen, 0.5) for _ in range(4)]
        for name, (_, p_of) in PROCEDURES.items():
            p_RH = np.concatenate([p_of(nulls).reshape(draws, -1), p_of(trues).reshape(draws, -1)], axis=1)
            called_RH = stats.false_discovery_control(p_RH, axis=1) < 0.05
            false_R = called_RH[:, : HEADS - TRUE_HEADS].sum(1)
            found.append(
                {
                    "procedure": name, "prompts": prompts, "risen": risen,
                    "false discoveries": float((false_R / np.maximum(called_RH.sum(1), 1)).mean()),
                    "power": float(called_RH[:, HEADS - TRUE_HEADS :].mean()),
                }
            )  # fmt: skip
    return found


# ---- means of real numbers: path effects ----


def mean_discoveries(pairs: int, operations: int, draws: int, seed: int = 0) -> list[Row]:
    """64 nodes without an effect, pairs of unlike spread: how often at least one is called at q < .05."""
    random = np.random.default_rng(seed)
    rates: dict[str, list[tuple[float, float]]] = {}
    shapes: list[Callable[[tuple[int, ...]], Floats]] = [
        lambda size: random.standard_normal(size),
        lambda size: random.laplace(size=size),
        lambda size: random.standard_normal(size) * np.where(random.random(size) < 0.2, 5, 0.5),
    ]
    for shape, spreads in itertools.product(shapes, ((1, 1, 1, 1), (1, 2, 3, 4), (1, 1, 1, 5))):
        x = [shape((draws, HEADS, pairs)) * spread for spread in spreads[:operations]]
        mean_RH = np.mean([part.mean(-1) for part in x], axis=0)
        error_RH = np.sqrt(sum(part.var(-1, ddof=1) / pairs for part in x)) / operations
        t_RH = np.abs(mean_RH) / error_RH
        for name, p_RH in (
            ("normal (before)", 2 * stats.norm.sf(t_RH)),
            ("student, degrees summed", 2 * stats.t.sf(t_RH, operations * (pairs - 1))),
            ("student", 2 * stats.t.sf(t_RH, pairs - 1)),
        ):
            called_R = (stats.false_discovery_control(p_RH, axis=1) < 0.05).any(1)
            rates.setdefault(name, []).append((float((p_RH < 0.05).mean()), float(called_R.mean())))
    return [
        {
            "procedure": name, "pairs": pairs, "operations": operations,
            "worst false alarms": max(alarm for alarm, _ in seen),
            "worst false discoveries": max(rate for _, rate in seen),
        }
        for name, seen in rates.items()
    ]  # fmt: skip


def skewed_discoveries(pairs: int, skewness: float, draws: int, seed: int = 0) -> list[Row]:
    """64 nodes without an effect in one operation, pairs of a gamma distribution (skewness 0: normal): Student's t, and
    Johnson's modified t (1978), which adds the skewness found to it.
    """
    random = np.random.default_rng(seed)
    size = (draws, HEADS, pairs)
    shape = 4 / skewness**2 if skewness else 0.0
    x_RHP = (random.gamma(shape, size=size) - shape) / np.sqrt(shape) if skewness else random.standard_normal(size)
    mean_RH, rest_RHP = x_RHP.mean(-1), x_RHP - x_RHP.mean(-1, keepdims=True)
    error_RH = x_RHP.std(-1, ddof=1) / np.sqrt(pairs)
    third_RH = (rest_RHP**3).mean(-1) / ((pairs - 1) * (pairs - 2))  # of the mean, not of one pair
    t_RH = mean_RH / error_RH
    rows: list[Row] = []
    for name, found_RH in (
        ("student", t_RH),
        ("johnson", t_RH + third_RH / error_RH**3 * (1 / 6 + t_RH**2 / 3)),
    ):
        p_RH = 2 * stats.t.sf(np.abs(found_RH), pairs - 1)
        called_R = (stats.false_discovery_control(p_RH, axis=1) < 0.05).any(1)
        rows.append(
            {
                "procedure": name, "pairs": pairs, "skewness": skewness,
                "false alarms": float((p_RH < 0.05).mean()), "false discoveries": float(called_R.mean()),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000, help="simulated experiments per case")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    asked = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    runs: dict[str, Callable[[], list[list[Row]]]] = {
        "accuracies": lambda: [coverage(prompts, asked.draws) for prompts in PROMPTS],
        "mean of accuracies": lambda: [coverage_of_all(prompts, asked.draws) for prompts in (4, 8, 12, 20, 50)],
        "64 heads": lambda: [discoveries(prompts, max(asked.draws // 20, 20)) for prompts in (4, 8, 12, 20, 50)],
        "path effects": lambda: [
            mean_discoveries(pairs, operations, max(asked.draws // 2, 50))
            for pairs, operations in itertools.product((4, 8, 12, 20, 50), (1, 4))
        ],
        "skewed path effects": lambda: [
            skewed_discoveries(pairs, skewness, max(asked.draws // 2, 50))
            for pairs, skewness in itertools.product((8, 12, 20, 50), (0.0, 1.0))
        ],
    }
    for title, run in runs.items():
        tables[title] = [row for rows in run() for row in rows]
        print(f"\n{title}")
        for row in tables[title]:
            print("  " + "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if asked.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
