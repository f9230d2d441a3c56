"""The tables that MLP probing fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

TARGETS = ("a", "b", "c")  # first digit tokens of operand A, operand B and the answer
MEASURES = ("mlp_in", "mlp_out", "difference")
MLP_PROBE = pa.schema(
    [
        LAYER,
        pa.field("prompt_id", pa.string()),
        pa.field("target", pa.string()),  # first digit token of: a, b (operands) or c (answer)
        pa.field("mlp_in", pa.float32()),  # cosine with the target's row of W_U
        pa.field("mlp_out", pa.float32()),
        pa.field("difference", pa.float32()),  # of mlp_out - mlp_in
    ]
)

TABLES = {
    "mlp_probe": Table(
        MLP_PROBE,
        ("layer", "target"),
        doc="cosine similarity of each MLP's input and output at END, and of their difference, with the "
        "unembedding of a target: the first digit token of operand A (a), operand B (b) or the answer (c) "
        "(paper B, section 4.2). The run's parameters say which vectors these are: residual (before and after "
        "the MLP) or written, and whether the final norm is folded in.",
    ),
}
