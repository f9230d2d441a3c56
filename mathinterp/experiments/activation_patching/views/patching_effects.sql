-- patching_effects: what patching one token of a kind does, per site, layer, direction, token_type, measure and operation, and
-- over 'all' (unweighted mean of the operations). n: pairs with such a token. change, gap: means of those of patching_prompts;
-- change_low, change_high: 95 % interval over pairs (Student's t, with the degrees of freedom of the
-- smallest operation: docs/statistics.md). pairs: those of the smallest operation. fraction = change / gap: 0 where
-- the patch does nothing, 1 where the answer's score becomes that of the sentence patched in. With 'denoising' it is the usual
-- recovered fraction (patched - counterfactual) / (original - counterfactual), with 'noising' 1 minus that. fraction_low,
-- fraction_high: 95 % interval after Fieller; null where the gap itself is not surely different from 0.
CREATE OR REPLACE VIEW patching_effects AS
WITH operations AS (
    SELECT run_id, site, layer, direction, token_type, measure, operation, count(*) AS n, avg(tokens) AS tokens,
           avg(change) AS change, avg(gap) AS gap,
           CASE WHEN count(*) > 1 THEN var_samp(change) / count(*) END AS change_variance,
           CASE WHEN count(*) > 1 THEN var_samp(gap) / count(*) END AS gap_variance,
           CASE WHEN count(*) > 1 THEN covar_samp(change, gap) / count(*) END AS covariance
    FROM patching_prompts GROUP BY ALL
), effects AS (
    SELECT run_id, site, layer, direction, token_type, measure,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, sum(n)::BIGINT AS n,
           avg(tokens) AS tokens, avg(change) AS change, avg(gap) AS gap,
           CASE WHEN min(n) > 1 THEN sum(change_variance) / count(*) ** 2 END AS change_variance,
           CASE WHEN min(n) > 1 THEN sum(gap_variance) / count(*) ** 2 END AS gap_variance,
           CASE WHEN min(n) > 1 THEN sum(covariance) / count(*) ** 2 END AS covariance,
           student_factor(min(n)) AS t, min(n) AS pairs
    FROM operations
    GROUP BY GROUPING SETS ((run_id, site, layer, direction, token_type, measure, operation),
                            (run_id, site, layer, direction, token_type, measure))
), fieller AS (
    SELECT *, gap ** 2 - t ** 2 * gap_variance AS a, change * gap - t ** 2 * covariance AS b,
           change ** 2 - t ** 2 * change_variance AS c
    FROM effects
)
SELECT run_id, site, layer, direction, token_type, measure, operation, n, tokens, change,
       change - t * sqrt(change_variance) AS change_low, change + t * sqrt(change_variance) AS change_high, gap,
       change / nullif(gap, 0) AS fraction,
       CASE WHEN a > 0 THEN (b - sqrt(greatest(0, b ** 2 - a * c))) / a END AS fraction_low,
       CASE WHEN a > 0 THEN (b + sqrt(greatest(0, b ** 2 - a * c))) / a END AS fraction_high,
       pairs, model, status
FROM fieller
JOIN run_states USING (run_id);
