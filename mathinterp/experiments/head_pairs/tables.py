"""The table that ablations of head pairs fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

HEAD_PAIR_SCAN = pa.schema(
    [
        LAYER,
        HEAD,
        pa.field("other_layer", pa.int16()),  # of the second head of a pair; null: one head alone
        pa.field("other_head", pa.int16()),
        pa.field("given", pa.bool_()),  # whether the run's given heads are out too
        *TOKEN_SCORE,
    ]
)

TABLES = {
    "head_pair_scan": Table(
        HEAD_PAIR_SCAN,
        ("layer", "head", "other_layer", "other_head", "given"),
        doc="every scored answer token with one head out, with two, or with the run's given heads out as well. layer"
        " and head are null in the rows where the given heads alone are out. The unchanged model is in baseline.",
    ),
}
