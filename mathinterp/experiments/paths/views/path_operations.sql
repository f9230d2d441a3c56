-- path_operations: per patched node and operation, the mean effect over pairs and the variance of that mean (null for a single
-- pair). logit_effect: mean relative change of the raw logit, whichever measure the run ranks by; logit_change: mean change.
-- operation is 'none' for prompts that name none.
CREATE OR REPLACE VIEW path_operations AS
SELECT s.run_id, s.node, s.layer, s.head, coalesce(p.operation, 'none') AS operation,
       count(*) AS n,
       avg(s.effect::DOUBLE) AS mean,
       CASE WHEN count(*) > 1 THEN var_samp(s.effect::DOUBLE) / count(*) END AS variance,
       avg((s.logit_patched::DOUBLE - s.logit_original) / abs(s.logit_original::DOUBLE)) AS logit_effect,
       avg(s.logit_patched::DOUBLE - s.logit_original) AS logit_change,
       avg(s.logprob_change::DOUBLE) AS logprob_change,
       avg(s.probability_change::DOUBLE) AS probability_change,
       avg(s.centred_change::DOUBLE) AS centred_change
FROM path_scan AS s
JOIN run_records AS r ON r.run_id = s.run_id AND NOT r.adaptive
JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
GROUP BY s.run_id, s.node, s.layer, s.head, coalesce(p.operation, 'none');
