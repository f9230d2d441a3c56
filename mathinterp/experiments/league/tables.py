"""The table that a league fills; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.attribution.tables import METHODS
from mathinterp.experiments.table import Table

COMPARED = (*METHODS, "mask")

LEAGUE_SCORES = pa.schema(
    [
        pa.field("method", pa.string()),
        pa.field("ranking_run", pa.string()),  # the run of the method; of "exact", that of the heads
        pa.field("measure", pa.string()),  # spearman, kendall, spearman_absolute, overlap, prompt_correlation
        pa.field("k", pa.int32()),  # of overlap; null for others
        pa.field("value", pa.float64()),
        pa.field("error", pa.float64()),  # bootstrap standard error over prompts
        pa.field("nodes", pa.int32()),
        pa.field("prompts", pa.int32()),
    ]
)

TABLES = {
    "league_scores": Table(
        LEAGUE_SCORES,
        ("method", "ranking_run", "measure"),
        doc="how well a method's effects of heads and MLPs agree with the exact ones (exact_node_effects) on the same"
        " prompts; method_league has them side by side. Of means over prompts: spearman and kendall (tau-b) rank"
        " correlations over nodes, spearman_absolute that of absolute values, overlap the share of the k nodes of"
        " largest absolute effect that both have (ties in expectation). prompt_correlation: Pearson correlation over"
        " nodes on one prompt, mean over prompts. error: standard deviation over bootstrap draws of prompts.",
    ),
}
