-- concept_zeroing_effects: what zeroing each set costs, per operation and over 'all' (unweighted mean of the operations'
-- accuracies). relative_drop: R = (original - zeroed) / original, a fraction. low, high: its 95 % interval, clustered by prompt, the
-- wider of Student's t and the score interval of the drop (docs/statistics.md). With b_i of n_i units right originally and h_i with the set at zero, and B, H and N the accuracies and units of
-- the prompt's operation, u_i = ((b_i - h_i) - (B - H) n_i - R (b_i - B n_i)) / N; the variance of R is the sum over the
-- operations of G/(G-1) * sum u_i^2 (G prompts), divided by (sum of B)^2. For one operation that is the variance of the
-- ratio sum (b_i - h_i) / sum b_i. high is cut at 1, all of the accuracy. Null where nothing was right originally.
CREATE OR REPLACE VIEW concept_zeroing_effects AS
WITH counted AS (
    SELECT run_id, neurons, level, seed, zeroed, prompt_id, n, baseline_hits, hits, logprob_change,
           operation AS own, unnest([operation, 'all']) AS operation
    FROM concept_zeroing_prompts
),
own AS (
    SELECT run_id, neurons, level, seed, zeroed, operation, own, count(*) AS clusters, sum(n) AS n,
           sum(baseline_hits) / sum(n) AS original, sum(hits) / sum(n) AS accuracy,
           sum(logprob_change) / sum(n) AS logprob_change,
           score_part(greatest(baseline_hits - hits, 0), greatest(hits - baseline_hits, 0), n) AS part
    FROM counted
    GROUP BY ALL
),
whole AS (
    SELECT run_id, neurons, level, seed, zeroed, operation, sum(n)::BIGINT AS n,
           avg(original) AS baseline_accuracy, avg(accuracy) AS accuracy,
           (sum(original) - sum(accuracy)) / nullif(sum(original), 0) AS relative_drop,
           sum(original) AS total, student_factor(min(clusters)) AS factor, avg(logprob_change) AS logprob_change,
           list(part ORDER BY own) AS parts
    FROM own
    GROUP BY ALL
),
spread AS (
    SELECT run_id, neurons, level, seed, operation, sum(variance) AS variance
    FROM (
        SELECT p.run_id, p.neurons, p.level, p.seed, p.operation, p.own,
               any_value(o.clusters) / nullif(any_value(o.clusters) - 1, 0) * sum((
                   ((p.baseline_hits - p.hits) - (o.original - o.accuracy) * p.n
                    - w.relative_drop * (p.baseline_hits - o.original * p.n)) / (o.n * w.total)) ** 2) AS variance
        FROM counted AS p
        JOIN own AS o USING (run_id, neurons, level, seed, operation, own)
        JOIN whole AS w USING (run_id, neurons, level, seed, operation)
        WHERE w.total > 0
        GROUP BY p.run_id, p.neurons, p.level, p.seed, p.operation, p.own
    )
    GROUP BY run_id, neurons, level, seed, operation
)
SELECT run_id, neurons, level, seed, zeroed, operation, w.n, baseline_accuracy, accuracy, relative_drop,
       least(relative_drop - factor * sqrt(variance),
             score_bound(baseline_accuracy - accuracy, parts, -1) / nullif(baseline_accuracy, 0)) AS low,
       CASE WHEN baseline_accuracy > 0 THEN
           least(greatest(relative_drop + factor * sqrt(variance),
                          score_bound(baseline_accuracy - accuracy, parts, 1) / baseline_accuracy), 1) END AS high,
       logprob_change, model, status
FROM whole AS w
JOIN run_states USING (run_id)
LEFT JOIN spread USING (run_id, neurons, level, seed, operation);
