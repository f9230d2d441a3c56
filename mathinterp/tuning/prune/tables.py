"""The tables that pruning fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

CONDITION = (
    pa.field("condition", pa.string()),  # origin, lora, pruned, random, pruned_lora or random_lora
    pa.field("seed", pa.int16()),  # of the random draw; 0 for the others
)
PRUNE_SCAN = pa.schema([*CONDITION, *TOKEN_SCORE])
PRUNE_NEURONS = pa.schema([*CONDITION, LAYER, pa.field("neuron", pa.int32())])  # kept in the pruned layers

TABLES = {
    "prune_scan": Table(
        PRUNE_SCAN,
        ("condition",),
        doc="scored answer tokens under each condition of a pruning experiment: lora (LoRA, nothing pruned), "
        "pruned and random (deep layers pruned to the chosen, or to as many random neurons), pruned_lora and "
        "random_lora (and a LoRA trained on that). The original model is the run's baseline. seed: of the "
        "random draw.",
    ),
    "prune_neurons": Table(
        PRUNE_NEURONS,
        ("condition", "layer"),
        doc="the neurons kept in the pruned layers, chosen (condition 'pruned') or drawn ('random', by seed).",
    ),
}
