-- path_effects: the effect of patching each node, per operation and over 'all' (unweighted mean of the operations, variance
-- sum(variance) / k^2). mean: of path_scan.effect over n pairs; low, high, p_value: Student's t with one degree of freedom less
-- than the smallest operation has pairs (docs/statistics.md). q_value: Benjamini-Hochberg over the run's heads, or over its MLPs,
-- each operation a family of its own; joint_q: over nodes and operations together. sure: q_value < 0.05, and the logit or its
-- log-probability moves by more than noise, what a change of nothing does (runs.notes; null, as sure then is: not known). below: mean under -0.05 (paper B).
-- key: below and sure. rank: 1 = the most negative mean of all nodes. pairs: those of the smallest operation; under 12 the
-- interval is rough. The other columns are means of the other measures (logit_effect, logit_change: of the raw logit).
CREATE OR REPLACE VIEW path_effects AS
SELECT run_id, node, layer, head, operation, n, mean, low, high, p_value,
       CASE WHEN p_value IS NOT NULL THEN
           min(p_value * tests / tried) OVER (PARTITION BY run_id, node, operation ORDER BY p_value DESC)
       END AS q_value,
       CASE WHEN p_value IS NOT NULL THEN
           min(p_value * joint_tests / joint_tried) OVER (PARTITION BY run_id, node ORDER BY p_value DESC)
       END AS joint_q,
       coalesce(q_value < 0.05, false) AND greatest(abs(logit_change), abs(logprob_change)) > noise AS sure,
       mean < -0.05 AS below, below AND sure AS key,
       row_number() OVER (PARTITION BY run_id, operation ORDER BY mean, layer, head NULLS LAST) AS rank,
       logit_effect, logit_change, logprob_change, probability_change, centred_change, pairs, noise, model, status
FROM (
    SELECT *, count(p_value) OVER (PARTITION BY run_id, node, operation) AS tests,
           count(p_value) OVER (PARTITION BY run_id, node, operation ORDER BY p_value) AS tried,
           count(p_value) OVER (PARTITION BY run_id, node) AS joint_tests,
           count(p_value) OVER (PARTITION BY run_id, node ORDER BY p_value) AS joint_tried
    FROM (
        SELECT *, mean - factor * sqrt(variance) AS low, mean + factor * sqrt(variance) AS high,
               mean_p(mean, variance, pairs) AS p_value
        FROM (
            SELECT run_id, node, layer, head,
                   CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
                   sum(n)::BIGINT AS n, min(n) AS pairs, student_factor(min(n)) AS factor, avg(mean) AS mean,
                   CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
                   avg(logit_effect) AS logit_effect, avg(logit_change) AS logit_change,
                   avg(logprob_change) AS logprob_change, avg(probability_change) AS probability_change,
                   avg(centred_change) AS centred_change
            FROM path_operations
            GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head))
        )
        LEFT JOIN (SELECT run_id, try_cast(notes ->> 'noise_floor' AS DOUBLE) AS noise FROM run_records) USING (run_id)
    )
)
JOIN run_states USING (run_id);
