-- ablation_effects: head_effects and mlp_effects in one. Operation 'all' is the unweighted mean over operations, with
-- variance sum(variance) / k^2. Two-sided normal p of drop = 0, but never below 2^(1 - moved), the least that flipping the
-- signs of the prompts that moved can give; 1 where nothing changed. 95 % normal interval;
-- q: Benjamini-Hochberg over the components of one run and operation.
CREATE OR REPLACE VIEW ablation_effects AS
SELECT run_id, node, layer, head, operation, n, baseline_accuracy, accuracy, drop, drop_low, drop_high, relative_drop, p_value,
       CASE WHEN p_value IS NOT NULL THEN
           min(p_value * tests / rank) OVER (PARTITION BY run_id, node, operation ORDER BY p_value DESC)
       END AS q_value,
       logprob_change, baseline_prompt_accuracy, prompt_accuracy
FROM (
    SELECT *, count(p_value) OVER (PARTITION BY run_id, node, operation) AS tests,
           count(p_value) OVER (PARTITION BY run_id, node, operation ORDER BY p_value) AS rank
    FROM (
        SELECT run_id, node, layer, head, operation, n, baseline_accuracy, accuracy, drop, moved,
               drop - 1.959963984540054 * sqrt(variance) AS drop_low,
               drop + 1.959963984540054 * sqrt(variance) AS drop_high,
               CASE WHEN baseline_accuracy > 0 THEN drop / baseline_accuracy END AS relative_drop,
               CASE WHEN drop = 0 THEN 1.0::DOUBLE
                    WHEN variance = 0 THEN 2.0::DOUBLE ** (1 - moved)
                    WHEN variance > 0 THEN greatest(erfc(abs(drop) / sqrt(2 * variance)), 2.0::DOUBLE ** (1 - moved))
                    END AS p_value,
               logprob_change, baseline_prompt_accuracy, prompt_accuracy
        FROM (
            SELECT run_id, node, layer, head,
                   CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
                   sum(n)::BIGINT AS n,
                   sum(moved)::BIGINT AS moved,
                   avg(baseline_accuracy) AS baseline_accuracy,
                   avg(accuracy) AS accuracy,
                   avg(drop) AS drop,
                   CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
                   avg(logprob_change) AS logprob_change,
                   avg(baseline_prompt_accuracy) AS baseline_prompt_accuracy, avg(prompt_accuracy) AS prompt_accuracy
            FROM ablated_operations
            GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head))
        )
    )
);
