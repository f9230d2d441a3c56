"""The tables that iterative masking fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER
from mathinterp.experiments.table import Table

ITERATIVE_SCAN = pa.schema(
    [
        pa.field("step", pa.int16()),  # from 0; the heads masked in steps before it are masked too
        LAYER,
        HEAD,
        pa.field("masked", pa.bool_()),  # whether the step masks this head
        pa.field("accuracy_before", pa.float32()),  # fraction, mean over operations: only the earlier heads masked
        pa.field("accuracy", pa.float32()),  # this head masked too
        pa.field("logprob_change", pa.float32()),  # nats a unit, mean over operations: what this head adds
    ]
)

TABLES = {
    "iterative_scan": Table(
        ITERATIVE_SCAN,
        doc="iterative masking. In step s every head left is masked together with the s heads masked before it; "
        "the one that costs most is the step's choice (masked). accuracy_before, accuracy: fractions, "
        "unweighted mean over operations, without and with this head masked; logprob_change: natural log, per "
        "unit, what this head adds.",
    ),
}
