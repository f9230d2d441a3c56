"""The tables that attention scans fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER
from mathinterp.experiments.table import Table

ATTENTION_SCAN = pa.schema(
    [
        LAYER,
        HEAD,  # query head
        pa.field("prompt_id", pa.string()),
        pa.field("token_type", pa.string()),  # bos, operand_a, operand_b, operator, equals or other
        pa.field("mean", pa.float32()),  # attention weight at END per token of the type; null if there is none
        pa.field("mass", pa.float32()),  # total weight on the type
        pa.field("tokens", pa.int16()),  # tokens of the type, up to END
        pa.field("argmax", pa.bool_()),  # whether a token of the type has the largest weight outside BOS
    ]
)

TABLES = {
    "attention_scan": Table(
        ATTENTION_SCAN,
        ("layer", "head", "token_type"),
        doc="what each head attends to from END (paper B, Figure 5): END's row of its attention matrix on the "
        "original prompt, by token type: bos, operand_a, operand_b, operator, equals, other; of other prompts the "
        "run's parameter types says which; and the types that the prompts name. mass: total "
        "weight on the type; the masses of a head and prompt sum to 1. mean: weight per token, null where the "
        "prompt has no such token. tokens: how many it has. argmax: the type holds the head's largest weight "
        "outside BOS, which as the attention sink never counts.",
    ),
}
