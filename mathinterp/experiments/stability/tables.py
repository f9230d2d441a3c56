"""The tables of rankings under other draws of prompts; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

FIRST = (5, 10, 32)  # k: how many nodes people look at
_WHICH = (
    pa.field("over", pa.string()),  # what was drawn: prompts or templates
    pa.field("operation", pa.string()),
    pa.field("node", pa.string()),  # its kind: nodes are ranked among their like
)
STABILITY_NODES = pa.schema(
    [
        *_WHICH,
        LAYER,
        pa.field("unit", pa.int32()),  # number of the head or neuron; null for a whole layer
        pa.field("rank", pa.int32()),  # under the run's own prompts, 1 = first
        pa.field("rank_low", pa.int32()),
        pa.field("rank_high", pa.int32()),
        *(pa.field(f"in_first_{k}", pa.float64()) for k in FIRST),  # null where there are not more than k nodes
        pa.field("known", pa.float64()),
    ]
)
STABILITY_OVERLAPS = pa.schema(
    [
        *_WHICH,
        pa.field("k", pa.int32()),
        pa.field("jaccard", pa.float64()),
        pa.field("jaccard_low", pa.float64()),
        pa.field("jaccard_high", pa.float64()),
        pa.field("pairwise", pa.float64()),
        pa.field("nodes", pa.int32()),
        pa.field("units", pa.int32()),  # prompts or templates drawn, of the smallest operation
    ]
)

TABLES = {
    "stability_nodes": Table(
        STABILITY_NODES,
        ("over", "operation", "node", "layer"),
        doc="rows of stability for every number of draws and every seed that was asked for; run_id is that of the"
        " computation (see stability_runs), not of the scan.",
    ),
    "stability_overlaps": Table(
        STABILITY_OVERLAPS,
        doc="rows of stability_overlap for every number of draws and every seed that was asked for; run_id is that of"
        " the computation (see stability_runs), not of the scan.",
    ),
}
