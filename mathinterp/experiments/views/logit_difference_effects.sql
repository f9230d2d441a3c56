-- logit_difference_effects: what ablating a head or MLP does to the logit difference between answer and distractor, of prompts
-- that have one (see head_scan_logit_differences), per operation and over 'all' (unweighted mean of the operations, variance
-- sum(variance) / k^2). baseline, ablated: mean logit differences over n prompts; change = ablated - baseline, with a 95 %
-- interval (Student's t), paired over prompts. distractor_predicted: share of prompts in which the ablated model predicts the distractor.
CREATE OR REPLACE VIEW logit_difference_effects AS
SELECT run_id, node, layer, head, operation, n, baseline, ablated, change,
       change - factor * sqrt(variance) AS change_low, change + factor * sqrt(variance) AS change_high,
       distractor_predicted, model, status
FROM (
    SELECT run_id, node, layer, head, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, student_factor(min(n)) AS factor, avg(baseline) AS baseline, avg(ablated) AS ablated, avg(change) AS change,
           avg(distractor_predicted) AS distractor_predicted,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance
    FROM (
        SELECT s.run_id, s.node, s.layer, s.head, coalesce(p.operation, 'none') AS operation, count(*) AS n,
               avg(b.logit_difference) AS baseline, avg(s.logit_difference) AS ablated,
               avg(s.logit_difference - b.logit_difference) AS change,
               avg(s.distractor_predicted::INTEGER) AS distractor_predicted,
               CASE WHEN count(*) > 1 THEN var_samp(s.logit_difference - b.logit_difference) / count(*) END AS variance
        FROM (
            SELECT 'head' AS node, run_id, layer, head, prompt_id, position, logit_difference, distractor_predicted
            FROM head_scan_logit_differences
            UNION ALL
            SELECT 'mlp' AS node, run_id, layer, NULL::SMALLINT AS head, prompt_id, position, logit_difference, distractor_predicted
            FROM mlp_scan_logit_differences
        ) AS s
        JOIN baseline_logit_differences AS b USING (run_id, prompt_id, position)
        JOIN run_records AS r ON r.run_id = s.run_id AND NOT r.adaptive
        JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
        GROUP BY s.run_id, s.node, s.layer, s.head, coalesce(p.operation, 'none')
    )
    GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head))
)
JOIN run_states USING (run_id);
