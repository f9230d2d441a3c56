"""How many neurons write concepts, beside random directions, and in which layers."""

import altair as alt

from mathinterp.experiments.charts import amount_colour, curves, heat
from mathinterp.experiments.concepts import ConceptOptions
from mathinterp.experiments.figures import Figure, Tip, titled
from mathinterp.experiments.results import Results

BEST, ONE = "neurons, best attention layer", "neurons, one attention layer"
DIRECT, RANDOM = "neurons, read directly", "random directions, one attention layer"


def draw(results: Results, shown: ConceptOptions) -> Figure:
    """Shares of neurons against the level; mean hits by layer and attention layer."""
    levels = results.frame(
        f"""SELECT level, unnest(['{BEST}', '{DIRECT}']) AS what, unnest([share, direct / total]) AS share, total AS n
            FROM concept_levels WHERE run_id = $run AND layer IS NULL
            UNION ALL
            SELECT level, unnest(['{ONE}', '{RANDOM}']),
                   unnest([sum(neurons * pairs) / sum(pairs), sum(random * pairs) / sum(pairs)]), sum(pairs)
            FROM concept_chance WHERE run_id = $run AND attention_layer IS NOT NULL GROUP BY level
            ORDER BY level"""
    )
    level, share = Tip("level", "hits more than", "whole"), Tip("share", "share", "%")
    curve = curves(
        levels, level, share, None, [Tip("what", "of", "text"), level, share, Tip("n", "n", "whole")],
        series=Tip("what", ""), order=[BEST, DIRECT, ONE, RANDOM], panel=None,
    )  # fmt: skip
    layers = results.frame(
        """SELECT coalesce(layer::VARCHAR, 'random') AS layer_name,
                  coalesce(attention_layer::VARCHAR, 'direct') AS through, n, with_hits, mean_hits, most_hits, best_of
           FROM concept_layers WHERE run_id = $run ORDER BY layer NULLS FIRST, attention_layer NULLS FIRST"""
    )
    tips = [
        Tip("layer_name", "neurons of layer", "text"), Tip("through", "through attention of layer", "text"),
        Tip("mean_hits", "mean hits"), Tip("most_hits", "most hits", "whole"),
        Tip("with_hits", "vectors with a hit", "whole"),
        Tip("n", "of vectors", "whole"), Tip("best_of", "neurons whose best it is", "whole"),
    ]  # fmt: skip
    through = sorted(set(layers["through"]), key=lambda name: -1 if name == "direct" else int(name))
    figure = heat(
        layers, Tip("through", "read through attention of layer"), Tip("layer_name", "neurons of layer"),
        amount_colour("mean_hits", "mean hits"), tips, across=through, up=list(dict.fromkeys(layers["layer_name"])),
    )  # fmt: skip
    return titled(
        alt.concat(
            curve.properties(title="Neurons with concepts"), figure.properties(title="Where they are"), columns=2
        ).resolve_scale(color="independent"),
        results, "Neurons that write concepts",
        "Curves of the share of neurons with more than so many concepts among their first tokens, beside random"
        " directions; a map of the mean number of concepts by layer and attention layer.",
    )  # fmt: skip
