"""The table that circuits fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.table import Table

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # MIB's

CIRCUIT_METRIC = pa.schema(
    [
        pa.field("ranking_run", pa.string()),  # ids with commas between, or a circuit file's name
        pa.field("method", pa.string()),
        pa.field("level", pa.string()),
        pa.field("ablation", pa.string()),
        pa.field("ordering", pa.string()),  # signed, absolute; of no ranking: empty, full
        pa.field("fraction", pa.float64()),
        pa.field("nodes", pa.int32()),
        pa.field("prompt_id", pa.string()),
        pa.field("metric", pa.float32()),
    ]
)

TABLES = {
    "circuit_metric": Table(
        CIRCUIT_METRIC,
        ("ranking_run", "method", "level", "ablation", "ordering", "prompt_id"),
        doc="the logit difference of one prompt, answer minus distractor at END, under one circuit: the first nodes of"
        " a ranking compute, all others have at every token what the ablation says. nodes: int(fraction * scored"
        " nodes) of largest score (ordering signed) or absolute score (absolute). ordering empty: nothing computes,"
        " and the input is replaced, too; full: the model as it is. level neuron: MLP neurons of a run's ranking, or"
        " of a circuit file the coordinates of what nodes write.",
    ),
}
