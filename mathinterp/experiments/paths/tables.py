"""The tables that path patching fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER, PAIR
from mathinterp.experiments.table import Table

PATH_NODE = (
    pa.field("node", pa.string()),  # head or mlp
    LAYER,
    HEAD,  # null for an MLP
    pa.field("prompt_id", pa.string()),
)
PATH_SCAN = pa.schema(
    [
        *PATH_NODE,
        pa.field("logit_original", pa.float32()),  # of the scored token, after a final soft-cap
        pa.field("logit_patched", pa.float32()),
        pa.field("effect", pa.float32()),  # under the measure that the run ranks by
        pa.field("logprob_change", pa.float32()),  # nats
        pa.field("probability_change", pa.float32()),
        pa.field("centred_change", pa.float32()),  # of the logit minus the vocabulary's mean logit
    ]
)
PATH_PAIRS = pa.schema([*PAIR, pa.field("predicted_id", pa.int32())])  # predicted on X_r
ATTRIBUTION_SCAN = pa.schema(
    [
        *PATH_NODE,
        pa.field("first_order", pa.float32()),  # estimated change of the logit: gradient x (X_c - X_r)
        pa.field("direct", pa.float32()),  # the node's direct share of the logit on X_r, before a final soft-cap
    ]
)
PATH_DISTRACTORS = pa.schema(
    [
        *PATH_NODE,
        pa.field("logit_original", pa.float32()),  # of the distractor's token
        pa.field("logit_patched", pa.float32()),
        pa.field("logprob_change", pa.float32()),  # nats
    ]
)

TABLES = {
    "path_distractors": Table(
        PATH_DISTRACTORS,
        ("node", "layer", "head"),
        doc="the distractor's token of each row of path_scan whose prompt has one: its logit on X_r, without and with "
        "the node as on X_c. See path_logit_differences.",
    ),
    "path_scan": Table(
        PATH_SCAN,
        ("node", "layer", "head"),
        doc="one row per patched node and pair (paper B, Algorithm 1; method.md section 3). node: 'head' or 'mlp' "
        "(head is null). logit_original, logit_patched: of the answer's first digit on X_r, without and with "
        "the node as on X_c. effect: under the run's measure (parameters.effect): logit and centred relative "
        "to the original, probability and logprob the change.",
    ),
    "path_pairs": Table(
        PATH_PAIRS,
        doc="the pairs of a path scan: scores of the first digit on X_r and X_c, and whether the pair was kept.",
    ),
    "attribution_scan": Table(
        ATTRIBUTION_SCAN,
        ("node", "layer", "head"),
        doc="for each node and pair of a path scan, first_order: the estimated change of the logit (gradient at "
        "X_r times X_c - X_r; logit_patched - logit_original is the exact one), and direct: the node's direct "
        "share of the logit on X_r.",
    ),
}
