"""The tables that head scans fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

HEAD_SCAN = pa.schema([LAYER, HEAD, *TOKEN_SCORE])

TABLES = {
    "head_scan": Table(
        HEAD_SCAN,
        ("layer", "head"),
        doc="every scored answer token with one attention head ablated (paper A, section 3). Columns as in baseline.",
    ),
}
