"""The tables that MLP scans fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER, TOKEN_SCORE
from mathinterp.experiments.table import Table

MLP_SCAN = pa.schema([LAYER, *TOKEN_SCORE])

TABLES = {
    "mlp_scan": Table(
        MLP_SCAN,
        ("layer",),
        doc="every scored answer token with one layer's whole MLP ablated. Columns as in baseline.",
    ),
}
