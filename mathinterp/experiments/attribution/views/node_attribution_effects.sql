-- node_attribution_effects: node_attributions per node and operation, 'all' being the unweighted mean of the operations: the mean
-- estimated effect over n prompts with a 95 % interval (Student's t) over prompts. The interval is of the estimate's mean: it
-- says nothing about how far the method is from the exact effect (method_league does).
CREATE OR REPLACE VIEW node_attribution_effects AS
SELECT run_id, method, node, layer, head, neuron, operation, n, effect,
       effect - factor * sqrt(variance) AS low, effect + factor * sqrt(variance) AS high, model, status
FROM (
    SELECT run_id, method, node, layer, head, neuron,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, student_factor(min(n)) AS factor, avg(effect) AS effect,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance
    FROM (
        SELECT a.run_id, a.method, a.node, a.layer, a.head, a.neuron, coalesce(p.operation, 'none') AS operation,
               count(*) AS n, avg(a.effect::DOUBLE) AS effect,
               CASE WHEN count(*) > 1 THEN var_samp(a.effect::DOUBLE) / count(*) END AS variance
        FROM node_attributions AS a
        JOIN run_records AS r ON r.run_id = a.run_id
        JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = a.prompt_id
        GROUP BY a.run_id, a.method, a.node, a.layer, a.head, a.neuron, coalesce(p.operation, 'none')
    )
    GROUP BY GROUPING SETS ((run_id, method, node, layer, head, neuron, operation), (run_id, method, node, layer, head, neuron))
)
JOIN run_states USING (run_id);
