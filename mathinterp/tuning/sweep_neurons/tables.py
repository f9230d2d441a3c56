"""The tables that the sweep's neurons fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

SWEEP_NEURONS = pa.schema(
    [
        pa.field("tuned_layer", pa.int16()),  # that has the LoRA
        pa.field("learning_rate", pa.float64()),
        pa.field("prompt_id", pa.string()),
        pa.field("rank", pa.int16()),  # by change of importance, tuned - original, over all layers; 1 = first
        LAYER,
        pa.field("neuron", pa.int32()),
        pa.field("importance", pa.float32()),  # original, nats
        pa.field("tuned_importance", pa.float32()),
        pa.field("coefficient", pa.float32()),  # original
        pa.field("tuned_coefficient", pa.float32()),
    ]
)

TABLES = {
    "sweep_neurons": Table(SWEEP_NEURONS, ("tuned_layer", "prompt_id", "layer")),
}
