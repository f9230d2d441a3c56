-- attribution_effects: attribution_scan per node and operation, 'all' being the unweighted mean of the operations.
-- first_order: mean estimated change of the logit (path_effects.logit_change is the exact one); direct: mean share of it on X_r.
CREATE OR REPLACE VIEW attribution_effects AS
SELECT run_id, node, layer, head, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
       sum(n)::BIGINT AS n, avg(first_order) AS first_order, avg(direct) AS direct
FROM (
    SELECT a.run_id, a.node, a.layer, a.head, coalesce(p.operation, 'none') AS operation, count(*) AS n,
           avg(a.first_order::DOUBLE) AS first_order, avg(a.direct::DOUBLE) AS direct
    FROM attribution_scan AS a
    JOIN run_records AS r USING (run_id)
    JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = a.prompt_id
    GROUP BY a.run_id, a.node, a.layer, a.head, coalesce(p.operation, 'none')
)
GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head));
