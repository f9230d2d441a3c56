"""How a neuron scan ranks neurons over its prompts: by the means of neuron_summary.

Of a prompt only the first neurons of each layer are stored, unless all are kept. The mean over all prompts is stored,
too, so that the mean of the values that are not stored is known: it stands for each of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mathinterp.experiments.ranking import Array, Means, Ranking

COMPETING = 500  # neurons per operation: no later one comes among the first 32

VALUES = f"""
WITH means AS (
    SELECT layer, neuron, coalesce(operation, 'none') AS operation, n, change::DOUBLE AS change,
           importance::DOUBLE AS importance, ranking
    FROM neuron_means JOIN neuron_runs USING (run_id) WHERE run_id = $run
), keys AS (
    SELECT layer, neuron, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           neuron_rank_key(any_value(ranking), avg(change), avg(importance)) AS key
    FROM means GROUP BY GROUPING SETS ((layer, neuron, operation), (layer, neuron))
), competing AS (
    SELECT DISTINCT layer, neuron FROM (
        SELECT layer, neuron FROM keys
        QUALIFY row_number() OVER (PARTITION BY operation ORDER BY key DESC, layer, neuron) <= {COMPETING}
    )
), stored AS (
    SELECT prompt_id, coalesce(operation, 'none') AS operation, layer, neuron, change::DOUBLE AS change,
           importance::DOUBLE AS importance
    FROM neuron_prompts JOIN competing USING (layer, neuron) WHERE run_id = $run
), sums AS (
    SELECT layer, neuron, operation, count(*) AS there, sum(change) AS change, sum(importance) AS importance
    FROM stored GROUP BY layer, neuron, operation
), rest AS (  -- the mean over the prompts that have no row of the neuron
    SELECT layer, neuron, operation,
           (n * m.change - coalesce(s.change, 0)) / (n - coalesce(there, 0)) AS change,
           (n * m.importance - coalesce(s.importance, 0)) / (n - coalesce(there, 0)) AS importance
    FROM means AS m JOIN competing USING (layer, neuron) LEFT JOIN sums AS s USING (layer, neuron, operation)
    WHERE n > coalesce(there, 0)
), asked AS (
    SELECT p.prompt_id, coalesce(p.operation, 'none') AS operation
    FROM neuron_targets AS t JOIN run_records AS r USING (run_id)
    JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = t.prompt_id
    WHERE t.run_id = $run AND t.condition = 'original'
)
SELECT 'neuron' AS node, layer, neuron AS unit, prompt_id, 1 AS n, stored.importance IS NOT NULL AS known,
       coalesce(stored.importance, rest.importance) AS importance,
       coalesce(stored.change, rest.change, stored.importance, rest.importance) AS change
FROM competing CROSS JOIN asked
LEFT JOIN stored USING (layer, neuron, operation, prompt_id)
LEFT JOIN rest USING (layer, neuron, operation)"""


def _order(means: Means, parameters: Mapping[str, Any]) -> Sequence[Array]:
    """neuron_rank_key of functions.sql; where nothing was compared, ``change`` is the importance."""
    change, importance = means["change"], means["importance"]
    if parameters["rank"] == "abs":
        return [-np.abs(change)]
    if parameters["rank"] == "ratio":
        return [-np.divide(change, np.abs(importance), out=np.zeros_like(change), where=importance != 0)]
    return [-change]


BY_MEAN = Ranking(VALUES, ("change", "importance"), _order, COMPETING)
