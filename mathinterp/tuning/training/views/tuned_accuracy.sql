-- tuned_accuracy: accuracy (a fraction of scored tokens) of each tuned model per operation and over 'all' (unweighted mean of
-- the operations), and its gain over the original model. Intervals (95 %) clustered by prompt, of shares for accuracies, paired
-- for the gain, and the p_value of the gain's statistic (docs/statistics.md).
CREATE OR REPLACE VIEW tuned_accuracy AS
SELECT run_id, condition, seed, layer, learning_rate, operation, n, baseline_accuracy, accuracy,
       share_bound(accuracy, right_parts, -1) AS low, share_bound(accuracy, right_parts, 1) AS high,
       gain, score_bound(gain, parts, -1) AS gain_low, score_bound(gain, parts, 1) AS gain_high,
       score_p(gain, parts) AS p_value,
       share_bound(baseline_accuracy, baseline_parts, -1) AS baseline_low,
       share_bound(baseline_accuracy, baseline_parts, 1) AS baseline_high
FROM (
    SELECT run_id, condition, seed, layer, learning_rate,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, avg(baseline_accuracy) AS baseline_accuracy, avg(accuracy) AS accuracy,
           avg(accuracy - baseline_accuracy) AS gain,
           list(part ORDER BY operation) AS parts, list(right_part ORDER BY operation) AS right_parts,
           list(baseline_part ORDER BY operation) AS baseline_parts
    FROM (
        SELECT run_id, condition, seed, layer, learning_rate, operation, sum(n) AS n,
               sum(baseline_hits) / sum(n) AS baseline_accuracy, sum(hits) / sum(n) AS accuracy,
               score_part(gained, lost, n) AS part, share_part(hits, n) AS right_part,
               share_part(baseline_hits, n) AS baseline_part
        FROM tuned_prompts
        GROUP BY run_id, condition, seed, layer, learning_rate, operation
    )
    GROUP BY GROUPING SETS ((run_id, condition, seed, layer, learning_rate, operation),
                            (run_id, condition, seed, layer, learning_rate))
);
