-- evaluation_scores: accuracy (a fraction) of each evaluation run, over all items (subset 'all') and per subset where a task
-- has several. low, high: 95 % Wilson interval. macro: unweighted mean over the subsets (MMLU: over subjects), for 'all' only.
-- truncated: items whose context was cut; unread: items from whose response no answer could be read.
CREATE OR REPLACE VIEW evaluation_scores AS
SELECT run_id, task, subset, n, accuracy,
       greatest((accuracy + z2 / (2 * n) - sqrt(z2 * (accuracy * (1 - accuracy) + z2 / (4 * n)) / n)) / (1 + z2 / n), 0) AS low,
       least((accuracy + z2 / (2 * n) + sqrt(z2 * (accuracy * (1 - accuracy) + z2 / (4 * n)) / n)) / (1 + z2 / n), 1) AS high,
       CASE WHEN subset = 'all' THEN macro END AS macro, truncated, unread
FROM (
    SELECT *, avg(accuracy) FILTER (WHERE subset <> 'all') OVER (PARTITION BY run_id) AS macro,
           count(*) FILTER (WHERE subset <> 'all') OVER (PARTITION BY run_id) AS subsets,
           1.959963984540054::DOUBLE ** 2 AS z2
    FROM (
        SELECT run_id, task, CASE WHEN grouping(subset) = 1 THEN 'all' ELSE subset END AS subset,
               count(*) AS n, avg(correct::INTEGER) AS accuracy,
               count(*) FILTER (WHERE truncated) AS truncated, count(*) FILTER (WHERE predicted IS NULL) AS unread
        FROM evaluations
        GROUP BY GROUPING SETS ((run_id, task, subset), (run_id, task))
    )
)
WHERE subset = 'all' OR subsets > 1;
