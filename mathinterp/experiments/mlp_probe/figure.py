"""The curves of an MLP probe: cosine of the MLP's output with the unembedding, against the layer."""

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import LAYER, OPERATION, Figure, N, Tip, interval, titled
from mathinterp.experiments.results import Results

COSINE = Tip("mlp_out", "cosine with the unembedding")


def draw(results: Results) -> Figure:
    """A line each for operand A, operand B and the answer, with 95 % intervals."""
    rows = results.frame(
        """SELECT layer, operation, upper(target) AS target, mlp_out, mlp_out_low AS low, mlp_out_high AS high,
                  mlp_in, n
           FROM mlp_probe_curve WHERE run_id = $run ORDER BY layer"""
    )
    tips = [
        Tip("target", "token", "text"), OPERATION, LAYER, COSINE, interval("low", "high", ""),
        Tip("mlp_in", "of the MLP's input"), N,
    ]  # fmt: skip
    return titled(
        curves(rows, LAYER, COSINE, ("low", "high"), tips, series=Tip("target", "token")), results,
        "What each MLP's output points to",
        "Curves of the cosine between the MLP's output at the last token and the unembedding of operand A, operand B"
        " and the answer, layer by layer, a panel for each operation.",
    )  # fmt: skip
