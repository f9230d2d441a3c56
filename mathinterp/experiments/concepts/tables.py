"""The tables that concept scans fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

CONCEPT_SCAN = pa.schema(
    [
        LAYER,  # of the neuron; null: a random direction
        pa.field("neuron", pa.int32()),  # or the direction's number
        pa.field("attention_layer", pa.int16()),  # through whose value-output matrix; null: the value itself
        pa.field("sign", pa.int8()),  # 1: the value, -1: its negative
        pa.field("hits", pa.int16()),  # concepts among the first tokens
        pa.field("concepts", pa.string()),  # JSON list of them, likeliest first; null: none
        pa.field("tokens", pa.string()),  # JSON list of the very first tokens; null where there are no hits
    ]
)

TABLES = {
    "concept_scan": Table(
        CONCEPT_SCAN,
        ("layer", "attention_layer", "sign", "hits"),
        doc="every neuron of the scanned layers (layer null: random directions, as many as a layer has neurons) "
        "through every attention layer's value-output matrix, and read directly (attention_layer null). hits: "
        "concepts among the run's first `top` tokens, distinct ones or all tokens as its `count` says. "
        "concepts: JSON list of those found, likeliest first (null: none); tokens: JSON list of the first ten "
        "tokens, kept where there is a hit and for what is read directly. sign -1: the value's negative.",
    ),
}
