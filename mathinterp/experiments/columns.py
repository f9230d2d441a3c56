"""Columns and tables that several experiments share.

Knows names and types only, so that reading a store needs no torch.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from mathinterp.experiments.table import Table

LAYER, HEAD = pa.field("layer", pa.int16()), pa.field("head", pa.int16())

TOKEN_SCORE = (
    pa.field("prompt_id", pa.string()),
    pa.field("position", pa.int16()),  # among the prompt's scored answer tokens, 0 = first; below 0: a distractor
    pa.field("correct", pa.bool_()),  # argmax equals gold
    pa.field("logprob", pa.float32()),  # of the gold token, nats
    pa.field("logit", pa.float32()),  # of the gold token, after a final soft-cap
    pa.field("predicted_id", pa.int32()),
)

PAIR = (
    pa.field("prompt_id", pa.string()),
    pa.field("correct", pa.bool_()),  # on X_r
    pa.field("kept", pa.bool_()),  # whether the scan's rows have the pair
    pa.field("logit_original", pa.float32()),  # of the scored token
    pa.field("logit_counterfactual", pa.float32()),
    pa.field("logprob_original", pa.float32()),  # nats
    pa.field("logprob_counterfactual", pa.float32()),
)

BASELINE = pa.schema(TOKEN_SCORE)


def cast_table(schema: pa.Schema, columns: Mapping[str, Any]) -> pa.Table:
    """The columns, by name, in the schema's order and types."""
    return pa.Table.from_arrays([pa.array(columns[field.name]).cast(field.type) for field in schema], schema=schema)


SHARED_TABLES = {
    "baseline": Table(
        BASELINE,
        doc="every scored answer token under the unchanged model, computed in the batch shape of its own run's "
        "interventions. correct: the most probable token is the gold one; logprob (natural log) and logit are "
        "those of the gold token.",
    )
}  # filled by every experiment that scores the unedited model
