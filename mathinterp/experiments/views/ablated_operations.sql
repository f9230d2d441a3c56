-- ablated_operations: per ablated component and operation, accuracies, the part that intervals and p-values are made from
-- (score_part in functions.sql), and the change of log-probability with its variance, clustered by prompt.
-- drop = sum d_i / sum n_i over prompts i (d_i units lost of n_i).
CREATE OR REPLACE VIEW ablated_operations AS
SELECT run_id, node, layer, head, operation,
       count(*) AS prompts,
       sum(n)::BIGINT AS n,
       sum(baseline_hits) / sum(n) AS baseline_accuracy,
       sum(hits) / sum(n) AS accuracy,
       (sum(baseline_hits) - sum(hits)) / sum(n) AS drop,
       score_part(fell, rose, n) AS part,
       sum(logprob_change) / sum(n) AS logprob_change,
       ratio_variance(logprob_change, n) AS logprob_variance,
       sum(baseline_whole) / count(*) AS baseline_prompt_accuracy, sum(whole_right) / count(*) AS prompt_accuracy
FROM ablated_prompts
GROUP BY run_id, node, layer, head, operation;
