"""The tables that an operand map fills; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

FAMILIES = (
    *(f"{of}_mod_{n}" for of in ("a", "b", "result") for n in (2, 5, 10)),
    *(f"{of}_tens" for of in ("a", "b", "result")),
    *(f"{of}_range" for of in ("a", "b", "result")),
    "carry",
    "equal",
)  # of heuristics; the units digit of a number is the number mod 10
PERIODS = (2, 5, 10, 100)
DIRECTIONS = ("a", "b", "sum", "difference")
POWERS = tuple(
    (direction, period) for period in PERIODS for direction in DIRECTIONS if (direction, period) != ("difference", 2)
)  # a + b and a - b have the same parity
MAP_BITS = 12  # significant bits of a stored map


def _floats(*names: str) -> list[pa.Field]:
    return [pa.field(name, pa.float32()) for name in names]


OPERAND_UNIT_MAPS = pa.schema(
    [
        pa.field("node", pa.string()),  # head or neuron
        pa.field("measure", pa.string()),
        LAYER,
        HEAD,  # null for a neuron
        pa.field("neuron", pa.int32()),  # null for a head
        *_floats("mean", "spread", "direct", "effect", "effect_size"),
        pa.field("heuristic", pa.string()),  # null where the map is constant
        pa.field("family", pa.string()),
        pa.field("high", pa.bool_()),  # above the other pairs where the heuristic holds; else below
        *_floats("auroc", "shuffled", "explained"),
        *_floats(*(f"auroc_{family}" for family in FAMILIES)),
        *_floats(*(f"power_{period}" for period in PERIODS)),
        *_floats(*(f"power_{direction}_{period}" for direction, period in POWERS)),
        pa.field("map", pa.list_(pa.float32())),  # null where it is not kept
    ]
)
OPERAND_PAIRS = pa.schema(
    [
        pa.field("place", pa.int32()),  # in a map, from 0
        pa.field("prompt_id", pa.string()),
        pa.field("a", pa.int16()),
        pa.field("b", pa.int16()),
        pa.field("result", pa.int32()),
        pa.field("tokens", pa.int32()),  # up to END
    ]
)
OPERAND_KEEP_SCAN = pa.schema(
    [
        pa.field("ranking", pa.string()),  # top or random
        pa.field("k", pa.int32()),  # neurons kept per layer
        *TOKEN_SCORE,
    ]
)
TABLES = {
    "operand_unit_maps": Table(
        OPERAND_UNIT_MAPS,
        ("node", "measure", "layer", "head", "heuristic", "family"),
        doc="per head and neuron what its map over the operand pairs says (operand_units has the columns), and the"
        f" map where it is kept: a list in the order of operand_pairs.place, rounded to {MAP_BITS} significant bits.",
    ),
    "operand_pairs": Table(
        OPERAND_PAIRS, doc="the operand pairs of a run, sorted by a and b; place: where they are in a stored map."
    ),
    "operand_keep_scan": Table(
        OPERAND_KEEP_SCAN,
        ("ranking",),
        doc="the first answer token where k neurons of each deep layer are kept at END and the others ablated. ranking:"
        " top (largest effect) or random.",
    ),
}
