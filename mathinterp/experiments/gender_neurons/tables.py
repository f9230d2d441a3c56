"""The tables that the gender scan of neurons fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

GENDER_NEURONS = pa.schema(
    [
        LAYER,
        pa.field("neuron", pa.int32()),
        pa.field("stereotype", pa.string()),  # woman or man
        pa.field("professions", pa.int16()),  # of this stereotype
        pa.field("change", pa.float32()),  # stereotyped - other
        pa.field("stereotyped", pa.float32()),  # importance, nats, summed over the professions, after their own gender
        pa.field("other", pa.float32()),  # the same after the other gender
    ]
)

TABLES = {
    "gender_neurons": Table(GENDER_NEURONS, ("layer", "stereotype")),
}
