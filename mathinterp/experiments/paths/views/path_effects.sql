-- path_effects: the effect of patching each node, per operation and over 'all' (unweighted mean of the operations, variance
-- sum(variance) / k^2). mean: of path_scan.effect over n pairs; low, high: 95 % normal interval over pairs. key: mean below
-- -0.05 (paper B). p_value: two-sided normal p of mean = 0, but never below 2^(1 - moved), the least that flipping the signs of the pairs that
-- moved can give; 1 where the mean is 0. q_value: Benjamini-Hochberg over the run's heads, or over its MLPs. rank: 1 = the most negative mean
-- of all nodes. The other columns are means of the other measures (logit_effect, logit_change: of the raw logit).
CREATE OR REPLACE VIEW path_effects AS
SELECT run_id, node, layer, head, operation, n, mean, low, high, p_value,
       CASE WHEN p_value IS NOT NULL THEN
           min(p_value * tests / tried) OVER (PARTITION BY run_id, node, operation ORDER BY p_value DESC)
       END AS q_value,
       mean < -0.05 AS key,
       row_number() OVER (PARTITION BY run_id, operation ORDER BY mean, layer, head NULLS LAST) AS rank,
       logit_effect, logit_change, logprob_change, probability_change, centred_change, model, status
FROM (
    SELECT *, count(p_value) OVER (PARTITION BY run_id, node, operation) AS tests,
           count(p_value) OVER (PARTITION BY run_id, node, operation ORDER BY p_value) AS tried
    FROM (
        SELECT *,
               mean - 1.959963984540054 * sqrt(variance) AS low,
               mean + 1.959963984540054 * sqrt(variance) AS high,
               CASE WHEN mean = 0 THEN 1.0::DOUBLE
                    WHEN variance = 0 THEN 2.0::DOUBLE ** (1 - moved)
                    WHEN variance > 0 THEN greatest(erfc(abs(mean) / sqrt(2 * variance)), 2.0::DOUBLE ** (1 - moved))
                    END AS p_value
        FROM (
            SELECT run_id, node, layer, head,
                   CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
                   sum(n)::BIGINT AS n, sum(moved)::BIGINT AS moved, avg(mean) AS mean,
                   CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
                   avg(logit_effect) AS logit_effect, avg(logit_change) AS logit_change,
                   avg(logprob_change) AS logprob_change, avg(probability_change) AS probability_change,
                   avg(centred_change) AS centred_change
            FROM path_operations
            GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head))
        )
    )
)
JOIN run_states USING (run_id);
