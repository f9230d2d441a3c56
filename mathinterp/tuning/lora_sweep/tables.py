"""The tables that the LoRA layer sweep fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

SWEEP_SCAN = pa.schema(
    [
        LAYER,  # that has the LoRA
        pa.field("learning_rate", pa.float64()),
        pa.field("training_loss", pa.float32()),  # nats an answer token, at the end
        pa.field("validation_loss", pa.float32()),
        pa.field("validation_accuracy", pa.float32()),  # of answer tokens; what the learning rate is chosen by
        pa.field("trained_parameters", pa.int64()),
        pa.field("seconds", pa.float32()),  # of training
        *TOKEN_SCORE,
    ]
)

TABLES = {
    "sweep_scan": Table(
        SWEEP_SCAN,
        ("layer",),
        doc="scored answer tokens of the test prompts under each trial of a LoRA layer sweep, one (layer, "
        "learning_rate), with the trial's own figures beside: losses (nats an answer token), accuracy of "
        "answer tokens on samples kept from training.",
    ),
}
