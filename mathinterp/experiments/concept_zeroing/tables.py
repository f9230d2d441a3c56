"""The tables that zeroed concept neurons fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import TOKEN_SCORE
from mathinterp.experiments.table import Table

CONCEPT_ZEROING = pa.schema(
    [
        pa.field("neurons", pa.string()),  # concepts (those kept at the level) or random (as many a layer)
        pa.field("level", pa.int16()),  # kept: hits > level
        pa.field("seed", pa.int16()),  # of the random draw; 0 for concepts
        pa.field("zeroed", pa.int32()),  # neurons at zero
        *TOKEN_SCORE,
    ]
)

TABLES = {
    "concept_zeroing": Table(
        CONCEPT_ZEROING,
        ("neurons", "level", "seed", "zeroed"),
        doc="every scored answer token with a whole set of neurons at zero. neurons: concepts (kept at the level "
        "by the concept scan that the run's parameters name as source) or random (as many others in each "
        "layer); zeroed: how many.",
    ),
}
