"""The tables that neuron scans fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

_PAIR = ("importance", "coefficient", "intervened_importance", "intervened_coefficient")
NEURON_SCAN = pa.schema(
    [
        pa.field("node", pa.string()),  # neuron; head; ffn (the whole MLP's output); neurons (sum); attention (whole)
        LAYER,
        pa.field("unit", pa.int32()),  # number of the neuron or head; 0 for the others
        pa.field("prompt_id", pa.string()),  # null: a summary over the operation's prompts
        pa.field("operation", pa.string()),
        pa.field("n", pa.int32()),  # prompts behind the row
        *(pa.field(name, pa.float32()) for name in _PAIR),  # of the prompt, or means; intervened: null if there is none
        *(pa.field(f"{name}_std", pa.float32()) for name in _PAIR),  # over prompts (divided by n); summaries only
        pa.field("change", pa.float32()),  # of importance; summaries only: else a view works it out
        pa.field("change_std", pa.float32()),
        pa.field("coefficient_change", pa.float32()),
        pa.field("coefficient_change_std", pa.float32()),
    ]
)
NEURON_TARGETS = pa.schema(
    [
        pa.field("prompt_id", pa.string()),
        pa.field("condition", pa.string()),  # original or intervened
        pa.field("target_id", pa.int32()),  # the token w that importances are about
        pa.field("logprob", pa.float32()),  # of w at END, nats
        pa.field("predicted_id", pa.int32()),
        pa.field("correct", pa.bool_()),  # predicted_id is the first scored answer token
    ]
)

TABLES = {
    "neuron_scan": Table(NEURON_SCAN, ("node", "layer", "operation", "prompt_id")),
    "neuron_targets": Table(
        NEURON_TARGETS,
        ("condition",),
        doc="the token that a prompt's importances are about, its log-probability (nats) at END, and what the "
        "model predicts there. condition: 'original' or 'intervened'. correct: predicted_id is the first "
        "scored answer token.",
    ),
}
