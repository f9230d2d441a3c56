-- residual_norm_means: the mean norm at END over the n prompts of a run, layer by layer.
CREATE OR REPLACE VIEW residual_norm_means AS
SELECT run_id, layer, count(*) AS n, avg(norm::DOUBLE) AS mean
FROM residual_norms
GROUP BY run_id, layer;
