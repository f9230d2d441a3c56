"""The map of an adaptive scan: what was decided of each node, and how many prompts that took."""

from matplotlib.figure import Figure

from mathinterp.experiments.figures import node_grid, panels, whole_numbers
from mathinterp.experiments.results import Results


def draw_decisions(results: Results) -> Figure:
    """Layers by heads (MLPs are a last column): estimates, marked where above the threshold, and prompts used."""
    found = results.frame(
        """SELECT node, layer, head, decision, -100 * estimate AS estimate, prompts_used, threshold
           FROM decisions WHERE run_id = $run"""
    )
    figure, axes = panels(2)
    bound = float(found["estimate"].abs().max()) or 1.0
    for axis, column, label in zip(
        axes, ("estimate", "prompts_used"), ("change, estimated, points", "prompts used"), strict=True
    ):
        signed = column == "estimate"
        low, high = (-bound, bound) if signed else (None, None)
        colours = "RdBu" if signed else "viridis"
        grid = node_grid(found, column)
        image = axis.imshow(grid, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="lower")
        axis.set(xlabel="head", ylabel="layer")
        whole_numbers(axis.xaxis, axis.yaxis)
        figure.colorbar(image, ax=axis, label=label)
    width = node_grid(found, "estimate").shape[1]
    above = found[found["decision"] == "above"]
    columns = above["head"].astype("Float64").fillna(width - 1).astype(int)
    axes[0].plot(columns, above["layer"], "k.", markersize=4)
    axes[0].set_title(f"dot: above {100 * found['threshold'].iloc[0]:g}" if len(found) else "nothing decided")
    return figure
