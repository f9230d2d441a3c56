"""The tables that a learned mask fills; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER
from mathinterp.experiments.table import Table

MASK_SCORES = pa.schema(
    [
        pa.field("node", pa.string()),  # head or mlp
        LAYER,
        HEAD,  # null for an MLP
        pa.field("log_alpha", pa.float32()),
        pa.field("open", pa.float32()),
    ]
)
MASK_TRAINING = pa.schema(
    [
        pa.field("step", pa.int32()),
        pa.field("loss", pa.float32()),
        pa.field("change", pa.float32()),
        pa.field("open", pa.float32()),
    ]
)

TABLES = {
    "mask_scores": Table(
        MASK_SCORES,
        ("node", "layer"),
        doc="one row per head and MLP of a learned mask: log_alpha, the trained location of its hard-concrete"
        " distribution, and open, the probability that the node keeps its own output at all.",
    ),
    "mask_training": Table(
        MASK_TRAINING,
        doc="one row per step of a mask's training, from 1: loss, of which change is the squared change of the logit"
        " difference under the mask (1: as large as that between the two sentences), the rest the penalty; open: mean"
        " probability of a node to be open. All before the step, on its pairs.",
    ),
}
