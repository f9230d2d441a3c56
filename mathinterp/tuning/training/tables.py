"""The tables that fine-tuning fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.table import Table

TUNING_RUNS = pa.schema(
    [
        pa.field("step", pa.int32()),  # optimizer steps done, from 1
        pa.field("loss", pa.float32()),  # nats an answer token, mean since the row before
        pa.field("lr", pa.float32()),  # of this step
        pa.field("samples_per_second", pa.float32()),  # all workers together, since the row before
        pa.field("tokens_per_second", pa.float32()),  # of the samples, padding not counted
        pa.field("memory", pa.int64()),  # bytes, most so far: on the GPU of worker 0, else of its process
        pa.field("trained_parameters", pa.int64()),
    ]
)

TABLES = {
    "tuning_runs": Table(
        TUNING_RUNS,
        doc="the course of every fine-tuning, one row each time it was looked at. loss: nats an answer token, "
        "mean since the row before; samples and tokens per second: all workers together, since the row before, "
        "without the time that writing checkpoints took; memory: bytes, the most so far of worker 0. What was "
        "trained on what: view runs (parameters, notes).",
    ),
}
