-- mlp_probe_operations: per layer, operation and target, mean cosines over n prompts and the variances of these means (null for
-- a single prompt). operation is 'none' for prompts that name none.
CREATE OR REPLACE VIEW mlp_probe_operations AS
SELECT s.run_id, s.layer, coalesce(p.operation, 'none') AS operation, s.target,
       count(*) AS n,
       avg(s.mlp_in::DOUBLE) AS mlp_in,
       avg(s.mlp_out::DOUBLE) AS mlp_out,
       avg(s.difference::DOUBLE) AS difference,
       CASE WHEN count(*) > 1 THEN var_samp(s.mlp_in::DOUBLE) / count(*) END AS mlp_in_variance,
       CASE WHEN count(*) > 1 THEN var_samp(s.mlp_out::DOUBLE) / count(*) END AS mlp_out_variance,
       CASE WHEN count(*) > 1 THEN var_samp(s.difference::DOUBLE) / count(*) END AS difference_variance
FROM mlp_probe AS s
JOIN run_records AS r USING (run_id)
JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
GROUP BY s.run_id, s.layer, coalesce(p.operation, 'none'), s.target;
