"""The tables that neuron edits fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

Condition = tuple[str, int]  # original, edited or random; and the seed
EDIT = (
    pa.field("edit", pa.string()),  # original, edited or random
    pa.field("seed", pa.int16()),  # of the random draw; 0 for the others
)
EDIT_SCAN = pa.schema([*EDIT, *TOKEN_SCORE])
EDIT_TEXT = pa.schema(
    [
        *EDIT,
        pa.field("passage", pa.int32()),  # number of the piece of text
        pa.field("tokens", pa.int32()),  # scored: all but the first
        pa.field("logprob", pa.float64()),  # nats, summed over them
    ]
)
EDIT_NEURONS = pa.schema([*EDIT, pa.field("rank", pa.int32()), LAYER, pa.field("neuron", pa.int32())])  # zeroed

TABLES = {
    "edit_scan": Table(
        EDIT_SCAN,
        ("edit",),
        doc="scored answer tokens of each prompt with a set of neurons zeroed. edit: 'original' (none), 'edited' "
        "(the run's neurons) or 'random' (as many others in each layer, drawn with `seed`).",
    ),
    "edit_text": Table(
        EDIT_TEXT,
        ("edit",),
        doc="ordinary text with the same neurons zeroed: tokens scored in each passage, and their summed log- "
        "probability.",
    ),
    "edit_neurons": Table(
        EDIT_NEURONS,
        ("edit",),
        doc="the neurons zeroed under each edit; rank 1 is the most important (random ones: in the order of the "
        "layers).",
    ),
}
