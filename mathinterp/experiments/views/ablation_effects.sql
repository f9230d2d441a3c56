-- ablation_effects: head_effects and mlp_effects in one. Operation 'all' is the unweighted mean over operations. Interval and p
-- of drop are one score statistic, paired and clustered by prompt (docs/statistics.md); those of logprob_change are Student's
-- t over the prompts of the smallest operation. q_value: Benjamini-Hochberg over the components of one run and operation, each
-- operation a family of its own; joint_q: over the components and operations of the run together.
-- prompts: those of the smallest operation; under 12 the intervals are rough. noise: the share of answers whose prediction
-- a change of nothing flips (runs.notes; null: not known). sure: q_value < 0.05 and abs(drop) > noise; null where only the
-- noise is not known.
CREATE OR REPLACE VIEW ablation_effects AS
SELECT run_id, node, layer, head, operation, n, baseline_accuracy, accuracy, drop, drop_low, drop_high, relative_drop, p_value,
       min(p_value * tests / tried) OVER (PARTITION BY run_id, node, operation ORDER BY p_value DESC) AS q_value,
       min(p_value * joint_tests / joint_tried) OVER (PARTITION BY run_id, node ORDER BY p_value DESC) AS joint_q,
       coalesce(q_value < 0.05, false) AND abs(drop) > noise AS sure,
       prompts, noise, logprob_change, logprob_low, logprob_high, baseline_prompt_accuracy, prompt_accuracy
FROM (
    SELECT *, count(*) OVER (PARTITION BY run_id, node, operation) AS tests,
           count(*) OVER (PARTITION BY run_id, node, operation ORDER BY p_value) AS tried,
           count(*) OVER (PARTITION BY run_id, node) AS joint_tests,
           count(*) OVER (PARTITION BY run_id, node ORDER BY p_value) AS joint_tried
    FROM (
        SELECT run_id, node, layer, head, operation, n, baseline_accuracy, accuracy, drop,
               score_bound(drop, parts, -1) AS drop_low,
               score_bound(drop, parts, 1) AS drop_high,
               CASE WHEN baseline_accuracy > 0 THEN drop / baseline_accuracy END AS relative_drop,
               score_p(drop, parts) AS p_value,
               prompts, noise, logprob_change,
               logprob_change - factor * sqrt(logprob_variance) AS logprob_low,
               logprob_change + factor * sqrt(logprob_variance) AS logprob_high,
               baseline_prompt_accuracy, prompt_accuracy
        FROM (
            SELECT run_id, node, layer, head,
                   CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
                   sum(n)::BIGINT AS n,
                   min(prompts) AS prompts,
                   student_factor(min(prompts)) AS factor,
                   avg(baseline_accuracy) AS baseline_accuracy,
                   avg(accuracy) AS accuracy,
                   avg(drop) AS drop,
                   list(part ORDER BY operation) AS parts,
                   avg(logprob_change) AS logprob_change,
                   CASE WHEN count(logprob_variance) = count(*) THEN sum(logprob_variance) / count(*) ** 2 END AS logprob_variance,
                   avg(baseline_prompt_accuracy) AS baseline_prompt_accuracy, avg(prompt_accuracy) AS prompt_accuracy
            FROM ablated_operations
            GROUP BY GROUPING SETS ((run_id, node, layer, head, operation), (run_id, node, layer, head))
        )
        LEFT JOIN noise_shares USING (run_id)
    )
);
