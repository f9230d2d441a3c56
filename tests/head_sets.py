"""Sets of heads over several layers, and what their outputs become: for tests of what edits many heads at once."""

from mathinterp.engine.intervention import Intervention, Tokens, Value, intervention
from mathinterp.engine.plain import PlainEngine
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head
from tests.exact import PROMPTS, random_prompts

RANKING = (Head(1, 3), Head(0, 2), Head(2, 0), Head(1, 0))
SETS: list[list[Head]] = [
    [Head(1, 0), Head(1, 3)],
    [Head(0, 1), Head(1, 2), Head(2, 0), Head(2, 3)],
    [],
    [Head(2, 1)],
]
BASE = [Head(0, 1), Head(1, 2)]
WITH_BASE: list[list[Head]] = [*([*BASE, Head(layer, head)] for layer in (2, 0, 1) for head in (0, 3)), BASE]

Values = dict[int, Value]  # by layer


def of_heads(sets: list[list[Head]], values: Values) -> list[Intervention]:
    """The heads of each set changed together."""
    return [intervention(heads, lambda _, layer: values[layer]) for heads in sets]


def zeros(anatomy: Anatomy) -> Values:
    return {layer: Value.zero(anatomy, "head", layer) for layer in range(anatomy.shape.n_layers)}


def resampled(anatomy: Anatomy) -> Values:
    """Values of another prompt at END, per prompt: what mean and resample ablation look like to an engine."""
    others = random_prompts()[::-1]
    source = PlainEngine(anatomy, others)
    return {
        layer: Value(source.activations("head", layer, Tokens.ends(others)), Tokens.ends(PROMPTS))
        for layer in range(anatomy.shape.n_layers)
    }
