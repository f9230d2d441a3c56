"""The tables that knock-outs fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

SHOWN_TOKENS = 5  # of each sentence and k, in knockout_examples
CURVE = (
    pa.field("ranking", pa.string()),  # effect, random or random_layer
    pa.field("seed", pa.int16()),  # of the random draw; 0 for effect
    pa.field("k", pa.int16()),  # heads knocked out together
)
KNOCKOUT_SCAN = pa.schema([*CURVE, *TOKEN_SCORE])
KNOCKOUT_HEADS = pa.schema([*CURVE, pa.field("place", pa.int16()), LAYER, HEAD])  # place: 1 = first of its ranking
KNOCKOUT_EXAMPLES = pa.schema(
    [
        pa.field("sentence", pa.string()),
        pa.field("k", pa.int16()),
        pa.field("rank", pa.int16()),  # 1 = likeliest next token
        pa.field("token_id", pa.int32()),
        pa.field("token", pa.string()),
        pa.field("probability", pa.float32()),
    ]
)

TABLES = {
    "knockout_scan": Table(
        KNOCKOUT_SCAN,
        ("ranking",),
        doc="every scored answer token with k heads knocked out together. ranking: effect (the first k of the "
        "run's ranking), random, or random_layer (as many in each layer as the first k have there, but from other "
        "layers where too few heads are left that are neither key heads nor knocked out); seed numbers the random "
        "draws. No rows for k = 0: that is the view baseline. Which heads: knockout_heads.",
    ),
    "knockout_heads": Table(
        KNOCKOUT_HEADS,
        doc="the heads that are out at each point of a knock-out curve; place 1 is the first of its ranking.",
    ),
    "knockout_examples": Table(
        KNOCKOUT_EXAMPLES,
        doc="the likeliest next tokens of chosen sentences with the first k heads of the run's ranking knocked "
        "out (paper B, Figure 4); k = 0 is the unchanged model, rank 1 the likeliest token.",
    ),
}
