"""The first neurons of a scan, and what layers add. What neurons write needs the model: the summary shows it."""

import altair as alt
import pandas as pd

from mathinterp.experiments.charts import curves, intervals
from mathinterp.experiments.figures import LAYER, OPERATION, Figure, N, Tip, titled
from mathinterp.experiments.neurons import NeuronsShown
from mathinterp.experiments.neurons.summary import first_neurons
from mathinterp.experiments.results import Results

PARTS = {"ffn": "MLP", "neurons_sum": "its neurons, summed", "attention": "attention", "heads_sum": "its heads, summed"}


def draw(results: Results, shown: NeuronsShown) -> Figure:
    """Each operation's neurons of largest mean change, or importance; importance of blocks, layer by layer."""
    (run,) = results.rows("SELECT parameters ->> 'against' AS against FROM runs WHERE run_id = $run")
    measure = "importance" if run["against"] is None else "change"
    found = pd.DataFrame(first_neurons(results, measure))
    value = Tip(measure, f"mean {measure}", "nats")
    more = [name for name in ("importance", "intervened_importance") if name in found and name != measure]
    tips = [
        Tip("neuron", "neuron", "text"), OPERATION, value, Tip(f"{measure}_std", "spread over prompts", "nats"),
        *(Tip(name, name.replace("_", " "), "nats") for name in more),
        *(Tip(name, name.replace("_", " ")) for name in ("coefficient", "intervened_coefficient") if name in found),
        Tip("in_top", "prompts with it among the first", "%"), N,
    ]  # fmt: skip
    order = list(dict.fromkeys(found["neuron"])) if len(found) else []
    first = intervals(
        found, Tip("neuron", "neuron"), value, None, tips, order=order, panel="operation", rule=[0], own_names=True
    )
    return titled(
        alt.vconcat(first, _layers(results)).resolve_scale(color="independent"), results,
        f"Neurons of largest mean {measure}",
        f"Points of the mean {measure} of each operation's first neurons, in nats; below, curves of what blocks and"
        " their parts add to the log-probability, layer by layer.",
        [] if results.finished else ["ranks are of the layers that are there"],
    )  # fmt: skip


def _layers(results: Results) -> Figure:
    rows = results.frame(
        """SELECT layer, operation, condition, n, unnest(['ffn', 'neurons_sum', 'attention', 'heads_sum']) AS part,
                  unnest([ffn, neurons_sum, attention, heads_sum]) AS nats
           FROM layer_importance WHERE run_id = $run AND condition = 'original' ORDER BY layer"""
    )
    rows = rows.assign(part=rows["part"].map(PARTS), operation=rows["operation"].fillna("none"))
    nats = Tip("nats", "importance", "nats")
    tips = [Tip("part", "of", "text"), OPERATION, LAYER, nats, N]
    return curves(rows, LAYER, nats, None, tips, series=Tip("part", ""), order=list(PARTS.values()))
