-- neuron_means: every neuron over all prompts of an operation (null for prompts that name none): mean and spread (standard
-- deviation, divided by n) of what neuron_summary has, before operations are put together.
CREATE OR REPLACE VIEW neuron_means AS
SELECT run_id, layer, unit AS neuron, operation, sum(n::BIGINT) AS n,  -- the blocks of prompts that shards are cut into, together
       pooled_mean(n, importance) AS importance, pooled_std(n, importance, importance_std) AS importance_std,
       pooled_mean(n, coefficient) AS coefficient, pooled_std(n, coefficient, coefficient_std) AS coefficient_std,
       pooled_mean(n, intervened_importance) AS intervened_importance, pooled_std(n, intervened_importance, intervened_importance_std) AS intervened_importance_std,
       pooled_mean(n, intervened_coefficient) AS intervened_coefficient, pooled_std(n, intervened_coefficient, intervened_coefficient_std) AS intervened_coefficient_std,
       pooled_mean(n, change) AS change, pooled_std(n, change, change_std) AS change_std,
       pooled_mean(n, coefficient_change) AS coefficient_change, pooled_std(n, coefficient_change, coefficient_change_std) AS coefficient_change_std
FROM ${neuron_scan}
WHERE node = 'neuron' AND prompt_id IS NULL
GROUP BY run_id, layer, unit, operation;
