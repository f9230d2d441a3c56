-- attention_by_type: what each head attends to from END, per operation and over 'all' (unweighted mean of the operations,
-- variance sum(variance) / k^2). mean: attention weight per token of the type, over prompts that have one. mass: total weight
-- on the type, over all n prompts; the masses of a head and operation sum to 1. low, high: 95 % interval of mass over
-- prompts (Student's t); mean_low, mean_high: of mean. argmax_share: part of the prompts in which the type holds the largest weight
-- outside BOS. tokens: mean number of tokens of the type.
CREATE OR REPLACE VIEW attention_by_type AS
SELECT run_id, layer, head, operation, token_type, mean, mass,
       mass - factor * sqrt(mass_variance) AS low,
       mass + factor * sqrt(mass_variance) AS high,
       argmax_share,
       mean - mean_factor * sqrt(mean_variance) AS mean_low,
       mean + mean_factor * sqrt(mean_variance) AS mean_high,
       tokens, n, model, status
FROM (
    SELECT run_id, layer, head, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, token_type,
           avg(mean) AS mean,
           CASE WHEN count(mean_variance) = count(mean) THEN sum(mean_variance) / count(mean) ** 2 END AS mean_variance,
           avg(mass) AS mass,
           CASE WHEN count(mass_variance) = count(*) THEN sum(mass_variance) / count(*) ** 2 END AS mass_variance,
           avg(argmax_share) AS argmax_share,
           avg(tokens) AS tokens,
           sum(n)::BIGINT AS n, student_factor(min(n)) AS factor, student_factor(min(n_with)) AS mean_factor
    FROM attention_operations
    GROUP BY GROUPING SETS ((run_id, layer, head, operation, token_type), (run_id, layer, head, token_type))
)
JOIN run_states USING (run_id);
