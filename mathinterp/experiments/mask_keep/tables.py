"""The tables that mask and keep fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

MASKKEEP_SCAN = pa.schema(
    [
        pa.field("mode", pa.string()),  # mask or keep
        pa.field("ranking", pa.string()),  # top (the prompt's first neurons) or random
        pa.field("seed", pa.int16()),  # of the random draw; 0 for top
        pa.field("k", pa.int32()),  # neurons of the prompt that are masked, or kept
        *TOKEN_SCORE,
    ]
)
MASKKEEP_NEURONS = pa.schema(
    [
        pa.field("ranking", pa.string()),
        pa.field("seed", pa.int16()),
        pa.field("prompt_id", pa.string()),
        pa.field("place", pa.int32()),  # 1 = first; places up to k are masked, or kept
        LAYER,
        pa.field("neuron", pa.int32()),
    ]
)

TABLES = {
    "maskkeep_scan": Table(
        MASKKEEP_SCAN,
        ("mode", "ranking", "prompt_id"),
        doc="every scored answer token with neurons of its prompt's own zeroed at every position. mode: mask (k "
        "neurons are zeroed) or keep (all other neurons of the deep layers are; earlier layers stay whole). "
        "ranking: top (the prompt's first k in the neuron scan that the run's parameter neurons_from names) "
        "or random (as many, in the same layers; seed numbers the draws). The unchanged model is in the view "
        "baseline. Which neurons: maskkeep_neurons.",
    ),
    "maskkeep_neurons": Table(
        MASKKEEP_NEURONS,
        ("ranking", "prompt_id", "layer"),
        doc="each prompt's neurons that are masked, or kept; those of places up to k. A random neuron has the "
        "layer of the neuron of ranking top at its place.",
    ),
}
