"""The tables that evaluations fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.table import Table

EVALUATIONS = pa.schema(
    [
        pa.field("task", pa.string()),  # a benchmark, or the name of a prompt set
        pa.field("subset", pa.string()),  # operation, MMLU's subject, else the task
        pa.field("item_id", pa.string()),
        pa.field("correct", pa.bool_()),
        pa.field("response", pa.string()),  # what the model wrote; under multiple choice the likeliest letter
        pa.field("predicted", pa.string()),  # the number or letter read from it; null if there is none
        pa.field("target", pa.string()),
        pa.field("logprob", pa.float32()),  # of the right choice, nats; null where text is generated
        pa.field("truncated", pa.bool_()),  # the context was cut on the left to fit the model
    ]
)

TABLES = {
    "evaluations": Table(EVALUATIONS, ("task", "subset")),
}
