"""The table of decisions, which every adaptive scan fills at its end; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER
from mathinterp.experiments.table import Table

DECISIONS = pa.schema(
    [
        pa.field("node", pa.string()),  # head or mlp
        LAYER,
        HEAD,  # null for an MLP
        pa.field("threshold", pa.float64()),  # fraction of 1
        pa.field("decision", pa.string()),  # above, not above or open
        pa.field("exact", pa.bool_()),  # every prompt was used, so nothing is estimated
        pa.field("prompts_used", pa.int32()),  # by the decision
        pa.field("prompts_run", pa.int32()),  # computed; more than used where a block began before the last was judged
        pa.field("cells", pa.int32()),  # that a full scan computes of the node: prompts of the population
        pa.field("e_above", pa.float64()),  # against "drop <= threshold"; infinite where certain
        pa.field("e_below", pa.float64()),  # against "drop >= threshold"
        pa.field("estimate", pa.float64()),
        pa.field("low", pa.float64()),
        pa.field("high", pa.float64()),
    ]
)

TABLES = {
    "decisions": Table(
        DECISIONS,
        ("node", "layer", "head"),
        doc="what an adaptive scan (`decide`) decided of each node; read head_decisions, mlp_decisions or"
        " path_decisions.",
    ),
}
