-- neuron_summary: every neuron over all prompts of an operation, also where no row of a prompt was kept. Means and spreads
-- (standard deviation over prompts, divided by n) of importance (nats), coefficient and their changes, signed as in
-- neuron_changes. in_top: part of the prompts in which the neuron is among the first `top` of all layers together.
-- Operation 'all' weighs operations equally: means of means, and the spread of that mixture. ranked_by: the run's measure
-- (see neuron_changes) of the mean change and importance.
CREATE OR REPLACE VIEW neuron_summary AS
SELECT means.run_id, layer, means.neuron, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
       sum(n)::BIGINT AS n,
       avg(change) AS change, sqrt(avg(change_std ** 2) + var_pop(change)) AS change_std,
       avg(coalesce(times, 0) / n) AS in_top,
       avg(importance) AS importance, sqrt(avg(importance_std ** 2) + var_pop(importance)) AS importance_std,
       avg(coefficient) AS coefficient, sqrt(avg(coefficient_std ** 2) + var_pop(coefficient)) AS coefficient_std,
       avg(intervened_importance) AS intervened_importance,
       sqrt(avg(intervened_importance_std ** 2) + var_pop(intervened_importance)) AS intervened_importance_std,
       avg(intervened_coefficient) AS intervened_coefficient,
       sqrt(avg(intervened_coefficient_std ** 2) + var_pop(intervened_coefficient)) AS intervened_coefficient_std,
       avg(coefficient_change) AS coefficient_change,
       sqrt(avg(coefficient_change_std ** 2) + var_pop(coefficient_change)) AS coefficient_change_std,
       neuron_rank_key(any_value(runs.ranking), avg(change), avg(importance)) AS ranked_by
FROM neuron_means AS means
LEFT JOIN (
    SELECT run_id AS run, layer AS at_layer, neuron AS top_neuron, operation AS counted, count(*) AS times
    FROM neuron_changes
    WHERE in_top
    GROUP BY ALL
) AS tops ON run = means.run_id AND at_layer = layer AND top_neuron = means.neuron AND counted IS NOT DISTINCT FROM operation
JOIN neuron_runs AS runs ON runs.run_id = means.run_id
GROUP BY GROUPING SETS ((means.run_id, layer, means.neuron, operation), (means.run_id, layer, means.neuron));
