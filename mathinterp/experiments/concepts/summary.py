"""What a finished concept scan says, from the stored rows alone (paper A, Tables 7 and 17).

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Sequence

from mathinterp.experiments.concepts import ConceptOptions
from mathinterp.experiments.results import Results, Row, Shown, Summary
from mathinterp.models.units import Neuron

SHARES = dict.fromkeys(("share", "one layer", "random"), "%")


def summarize(results: Results, shown: ConceptOptions) -> Summary:
    """Neurons kept at each level, the first few of them, and what chance alone would give."""
    run = results.rows(
        """SELECT (parameters ->> 'top')::INTEGER AS top, (notes ->> 'concepts_in_vocabulary')::INTEGER AS concepts,
               (notes ->> 'concept_tokens')::INTEGER AS tokens, (notes ->> 'expected_hits')::DOUBLE AS expected_hits,
               (notes ->> 'concepts_in_list')::INTEGER AS listed
            FROM run_records WHERE run_id = $run"""
    )[0]
    top, listed = run.pop("top"), run.pop("listed")
    kept, leaders = level_table(results, shown.levels), _examples(results, shown.show)
    parts: list[Shown | str] = [
        Shown(f"Neurons with concepts among their first {top} tokens", kept, SHARES),
        _chance_line(run, top, listed),
        Shown("Most hits", leaders),
    ]
    if not shown.zero or not any(row["neurons"] for row in kept):
        parts.append("No neurons were zeroed.")
    return Summary(
        parts=parts,
        data={"top_tokens": top, "levels": kept, "examples": leaders, "chance": run},
        queries=[
            results.query("SELECT * FROM paper_a_table17 WHERE run_id = $run ORDER BY rank LIMIT 20"),
            results.query("SELECT * FROM concept_layers WHERE run_id = $run ORDER BY layer, attention_layer"),
        ],
    )


def _chance_line(chance: Row, top: int, listed: int | None) -> str:
    """``listed``: concepts looked for; None in runs of earlier versions."""
    concepts = f"{chance['concepts']} concepts" if listed is None else f"{chance['concepts']} of the {listed} concepts"
    return (
        "neurons: through the best attention layer; one layer, random: neurons and random directions through one"
        f" attention layer, on average. {chance['tokens']} tokens spell {concepts}: in a random order"
        f" {chance['expected_hits']:.3g} of the first {top} would be one."
    )


def level_table(results: Results, levels: Sequence[int]) -> list[Row]:
    """Paper A's Table 7: neurons kept at each level, beside those with as many hits when read directly.

    The last two columns are shares through one attention layer, not the best of several: of neurons, and of random
    directions, averaged with the weights of the neurons' attention layers.
    """
    rows = results.rows(
        """SELECT k.level, k.kept, k.total, k.share, k.direct, c.neurons, c.random
            FROM concept_levels AS k
            JOIN (
                SELECT level, sum(neurons * pairs) / sum(pairs) AS neurons,
                       sum(random * pairs) / sum(pairs) AS random
                FROM concept_chance WHERE run_id = $run AND attention_layer IS NOT NULL GROUP BY level
            ) AS c USING (level)
            WHERE k.run_id = $run AND k.layer IS NULL"""
    )
    found = {row["level"]: row for row in rows}
    total = max((row["total"] for row in rows), default=0)
    nothing = {"kept": 0, "total": total, "share": 0.0, "direct": 0, "neurons": 0.0, "random": 0.0}
    return [
        {
            "hits more than": level,
            "neurons": row["kept"],
            "of": row["total"],
            "share": row["share"],
            "read directly": row["direct"],
            "one layer": row["neurons"],
            "random": row["random"],
        }
        for level, row in ((level, found.get(level, nothing)) for level in levels)
    ]


def _examples(results: Results, most: int) -> list[Row]:
    """Paper A's Table 17: the neurons with most hits, and their first tokens with and without attention."""
    return results.rows(
        """SELECT neuron, attention_layer AS attention, sign, hits, direct_hits AS direct, concepts,
               transformed_tokens AS "tokens through attention", direct_tokens AS "tokens read directly"
            FROM paper_a_table17 WHERE run_id = $run AND rank <= $most ORDER BY rank""",
        most=most,
    )


def kept_neurons(results: Results, levels: Sequence[int]) -> dict[int, tuple[Neuron, ...]]:
    """Level M -> the neurons with more than M hits, by layer and number; levels that keep none are left out."""
    rows = results.rows(
        """SELECT layer, neuron, hits FROM concept_neurons WHERE run_id = $run AND hits > $lowest
            ORDER BY layer, neuron""",
        lowest=min(levels),
    )
    sets = {
        level: tuple(Neuron(row["layer"], row["neuron"]) for row in rows if row["hits"] > level) for level in levels
    }
    return {level: neurons for level, neurons in sets.items() if neurons}
