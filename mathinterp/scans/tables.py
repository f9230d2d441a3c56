"""The columns of every table that scans fill; the store adds run_id.

Knows names and types only, so that reading a store needs no torch.
"""

import pyarrow as pa

LAYER, HEAD = pa.field("layer", pa.int16()), pa.field("head", pa.int16())

TOKEN_SCORE = (
    pa.field("prompt_id", pa.string()),
    pa.field("position", pa.int16()),  # index among the prompt's scored answer tokens, 0 = first
    pa.field("correct", pa.bool_()),  # argmax equals gold
    pa.field("logprob", pa.float32()),  # of the gold token, nats
    pa.field("logit", pa.float32()),  # of the gold token, after a final soft-cap
    pa.field("predicted_id", pa.int32()),
)

BASELINE = pa.schema(TOKEN_SCORE)
HEAD_SCAN = pa.schema([LAYER, HEAD, *TOKEN_SCORE])
MLP_SCAN = pa.schema([LAYER, *TOKEN_SCORE])
