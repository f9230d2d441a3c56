-- path_logit_differences: what patching each node does to the logit difference between answer and distractor, of prompts that
-- have one, per operation and over 'all' (unweighted mean of the operations, variance sum(variance) / k^2). baseline, patched:
-- mean logit differences over n pairs; change = patched - baseline, with a 95 % interval (Student's t) over pairs.
CREATE OR REPLACE VIEW path_logit_differences AS
SELECT run_id, node, layer, head, operation, n, baseline, patched, change,
       change - factor * sqrt(variance) AS change_low, change + factor * sqrt(variance) AS change_high,
       model, status
FROM (
    SELECT run_id, node, layer, head, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, student_factor(min(n)) AS factor, avg(baseline) AS baseline, avg(patched) AS patched, avg(patched - baseline) AS change,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance
    FROM (
        SELECT run_id, node, layer, head, operation, count(*) AS n, avg(before) AS baseline, avg(after) AS patched,
               CASE WHEN count(*) > 1 THEN var_samp(after - before) / count(*) END AS variance
        FROM (
            SELECT s.run_id, s.node, s.layer, s.head, coalesce(p.operation, 'none') AS operation,
                   s.logit_original::DOUBLE - d.logit_original AS before, s.logit_patched::DOUBLE - d.logit_patched AS after
            FROM path_scan AS s
            JOIN path_distractors AS d ON d.run_id = s.run_id AND d.node = s.node AND d.layer = s.layer
                AND d.head IS NOT DISTINCT FROM s.head AND d.prompt_id = s.prompt_id
            JOIN run_records AS r ON r.run_id = s.run_id AND NOT r.adaptive
            JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
        )
        GROUP BY run_id, node, layer, head, operation
    )
    GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head))
)
JOIN run_states USING (run_id);
