-- attention_operations: per head, operation and token type, means over n prompts and the variances of these means (null for a
-- single prompt). mean is over prompts that have a token of the type. operation is 'none' for prompts that name none.
CREATE OR REPLACE VIEW attention_operations AS
SELECT s.run_id, s.layer, s.head, coalesce(p.operation, 'none') AS operation, s.token_type,
       count(*) AS n, count(s.mean) AS n_with,
       avg(s.mean::DOUBLE) AS mean,
       CASE WHEN count(s.mean) > 1 THEN var_samp(s.mean::DOUBLE) / count(s.mean) END AS mean_variance,
       avg(s.mass::DOUBLE) AS mass,
       CASE WHEN count(*) > 1 THEN var_samp(s.mass::DOUBLE) / count(*) END AS mass_variance,
       avg(s.argmax::INTEGER) AS argmax_share,
       avg(s.tokens) AS tokens
FROM attention_scan AS s
JOIN run_records AS r USING (run_id)
JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
GROUP BY s.run_id, s.layer, s.head, coalesce(p.operation, 'none'), s.token_type;
