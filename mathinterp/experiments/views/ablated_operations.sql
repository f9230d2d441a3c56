-- ablated_operations: per ablated component and operation, accuracies and the variance of their difference.
-- drop = sum d_i / sum n_i over prompts i (d_i units lost of n_i); its variance, clustered by prompt, is
-- G/(G-1) * sum e_i^2 / (sum n_i)^2 with e_i = d_i - drop * n_i. The sum of squares is written in whole numbers, so that
-- it is exactly 0 where every prompt moved alike. One prompt alone has no variance (null).
-- moved: prompts whose number of right units changed.
CREATE OR REPLACE VIEW ablated_operations AS
SELECT run_id, node, layer, head, operation, n, moved,
       baseline_hits / n AS baseline_accuracy,
       hits / n AS accuracy,
       lost / n AS drop,
       CASE WHEN prompts > 1 THEN
           prompts / (prompts - 1) * ((n::HUGEINT * n * dd - 2 * n::HUGEINT * lost * dn + lost::HUGEINT * lost * nn)::DOUBLE / n::DOUBLE ** 4)
       END AS variance,
       logprob_change / n AS logprob_change,
       baseline_whole / prompts AS baseline_prompt_accuracy, whole_right / prompts AS prompt_accuracy
FROM (
    SELECT run_id, node, layer, head, operation,
           count(*) AS prompts,
           sum(n)::BIGINT AS n,
           count_if(baseline_hits <> hits) AS moved,
           sum(baseline_hits)::BIGINT AS baseline_hits,
           sum(hits)::BIGINT AS hits,
           sum(baseline_hits - hits)::BIGINT AS lost,
           sum((baseline_hits - hits) * (baseline_hits - hits))::HUGEINT AS dd,
           sum((baseline_hits - hits) * n)::HUGEINT AS dn,
           sum(n * n)::HUGEINT AS nn,
           sum(logprob_change) AS logprob_change,
           sum(baseline_whole)::BIGINT AS baseline_whole, sum(whole_right)::BIGINT AS whole_right
    FROM ablated_prompts
    GROUP BY run_id, node, layer, head, operation
);
