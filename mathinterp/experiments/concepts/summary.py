"""What a finished concept scan and the zeroing of its sets say, from the stored rows alone.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from mathinterp.models.units import Neuron
from mathinterp.store import Store


@dataclass(frozen=True)
class ConceptSummary:
    """The answer of a concept scan.

    levels: paper A's Table 7: neurons kept at each level, beside those with as many hits when read directly. The last
        two columns are shares through one attention layer, not the best of several: of neurons, and of random
        directions, averaged with the weights of the neurons' attention layers.
    examples: paper A's Table 17: the neurons with most hits, and their first tokens with and without attention.
    chance: concepts that are tokens, tokens that are concepts, and the hits expected in a random order.
    """

    levels: list[dict[str, Any]]
    examples: list[dict[str, Any]]
    chance: dict[str, Any]


def summarize_concepts(store: Store, run_id: str, levels: Sequence[int], examples: int) -> ConceptSummary:
    """Summarize a concept scan at ``levels``, with ``examples`` neurons."""
    connection = store.connect()
    shown = connection.sql(
        f"""SELECT neuron, attention_layer AS attention, sign, hits, direct_hits AS direct, concepts,
               transformed_tokens AS "tokens through attention", direct_tokens AS "tokens read directly"
            FROM paper_a_table17 WHERE run_id = '{run_id}' AND rank <= {examples} ORDER BY rank"""
    )
    chance = connection.sql(
        f"""SELECT (notes ->> 'concepts_in_vocabulary')::INTEGER AS concepts,
               (notes ->> 'concept_tokens')::INTEGER AS tokens, (notes ->> 'expected_hits')::DOUBLE AS expected_hits
            FROM run_records WHERE run_id = '{run_id}'"""
    )
    return ConceptSummary(
        _level_table(connection, run_id, levels),
        shown.to_arrow_table().to_pylist(),
        chance.to_arrow_table().to_pylist()[0],
    )


def _level_table(connection: duckdb.DuckDBPyConnection, run_id: str, levels: Sequence[int]) -> list[dict[str, Any]]:
    rows = connection.sql(
        f"""SELECT k.level, k.kept, k.total, 100 * k.share AS share, k.direct, c.neurons, c.random
            FROM concept_levels AS k
            JOIN (
                SELECT level, 100 * sum(neurons * pairs) / sum(pairs) AS neurons,
                       100 * sum(random * pairs) / sum(pairs) AS random
                FROM concept_chance WHERE run_id = '{run_id}' AND attention_layer IS NOT NULL GROUP BY level
            ) AS c USING (level)
            WHERE k.run_id = '{run_id}' AND k.layer IS NULL"""
    )
    found = {row["level"]: row for row in rows.to_arrow_table().to_pylist()}
    nothing = {"kept": 0, "total": found[0]["total"], "share": 0.0, "direct": 0, "neurons": 0.0, "random": 0.0}
    return [
        {
            "hits more than": level,
            "neurons": row["kept"],
            "of": row["total"],
            "share (%)": row["share"],
            "read directly": row["direct"],
            "one layer (%)": row["neurons"],
            "random (%)": row["random"],
        }
        for level, row in ((level, found.get(level, nothing)) for level in sorted(levels))
    ]


def kept_neurons(store: Store, run_id: str, levels: Sequence[int]) -> dict[int, tuple[Neuron, ...]]:
    """Level M -> the neurons with more than M hits, by layer and number; levels that keep none are left out."""
    rows = store.rows(
        f"""SELECT layer, neuron, hits FROM concept_neurons WHERE run_id = '{run_id}' AND hits > {min(levels)}
            ORDER BY layer, neuron"""
    )
    sets = {
        level: tuple(Neuron(row["layer"], row["neuron"]) for row in rows if row["hits"] > level) for level in levels
    }
    return {level: neurons for level, neurons in sets.items() if neurons}


def zeroing_table(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Paper A's Table 8: relative decrease (%) with each level's neurons at zero, and with random ones."""
    return store.rows(
        f"""SELECT level AS "hits more than", operation, neurons, decrease, low, high, random,
               random_least AS "random least", random_most AS "random most"
            FROM paper_a_table8 WHERE run_id = '{run_id}'
            ORDER BY level, operation = 'all' DESC, operation"""
    )


def missing_controls(store: Store, run_id: str) -> list[str]:
    """A line for each level of a zeroing run that has no random sets though some were asked for: which layer is full.

    A random set has as many neurons in each layer as the level's own, and none of them: that takes half a layer.
    """
    rows = store.rows(
        f"""SELECT level, layer, count(*) FILTER (hits > level) AS zeroed, count(*) AS neurons
            FROM concept_neurons AS found
            JOIN (
                SELECT DISTINCT level, parameters ->> 'source' AS source FROM paper_a_table8 JOIN runs USING (run_id)
                WHERE run_id = '{run_id}' AND random_sets = 0 AND (parameters ->> 'seeds')::INTEGER > 0
            ) AS alone ON found.run_id = alone.source
            GROUP BY level, layer
            QUALIFY row_number() OVER (PARTITION BY level ORDER BY zeroed / neurons DESC, layer) = 1
            ORDER BY level"""
    )
    return [
        f"No random sets for hits > {row['level']}: {row['zeroed']} of the {row['neurons']} neurons of layer"
        f" {row['layer']} are zeroed, so there are not as many others to draw there; take higher --levels."
        for row in rows
    ]
