"""The tables that activation patching fills; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER, PAIR
from mathinterp.experiments.table import Table

SITES = ("residual", "attention", "mlp")
DIRECTIONS = ("denoising", "noising")
PATCHING_SCAN = pa.schema(
    [
        pa.field("site", pa.string()),
        LAYER,
        pa.field("direction", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("token", pa.int16()),  # index of the patched token in the prompt
        pa.field("token_type", pa.string()),
        pa.field("at_end", pa.bool_()),  # the last token, whose logits are scored
        pa.field("logit", pa.float32()),  # of the answer's first digit, after a final soft-cap
        pa.field("logprob", pa.float32()),  # nats
        pa.field("predicted_id", pa.int32()),
    ]
)
PATCHING_PAIRS = pa.schema(PAIR)

TABLES = {
    "patching_scan": Table(
        PATCHING_SCAN,
        ("site", "layer", "direction", "token_type"),
        doc="one row per patched place and kept pair. site: 'residual' (the stream that the layer reads), 'attention' "
        "(the output of the output projection) or 'mlp' (the MLP's output). direction: 'denoising' (X_c runs, patched "
        "from X_r) or 'noising' (X_r runs, patched from X_c). token: index of the patched token, with its token_type "
        "on X_r (bos, operand_a, operand_b, operator, equals, other). logit, logprob: of the answer's first digit.",
    ),
    "patching_pairs": Table(
        PATCHING_PAIRS,
        doc="the pairs of activation patching: scores of the first digit on X_r and X_c, unpatched, and whether the "
        "pair was kept.",
    ),
}
