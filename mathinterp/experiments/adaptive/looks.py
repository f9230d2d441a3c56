"""When an adaptive scan looks: prompts in before each judgement."""

FIRST, GROWTH = 32, 1.4
STEP = 16  # looks are multiples of it: full batches


def looks(population: int) -> tuple[int, ...]:
    """Cumulative prompt counts, growing geometrically; the last is the whole population."""
    counts = [min(FIRST, population)]
    while counts[-1] < population:
        following = max(counts[-1] + STEP, int(counts[-1] * GROWTH) // STEP * STEP)
        counts.append(population if following * GROWTH > population + FIRST else following)
    return tuple(counts)
