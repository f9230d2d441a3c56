-- mlp_probe_curve: mean cosine of MLP input, output and their difference with each target (columns as in mlp_probe), layer by
-- layer, per operation and over 'all' (unweighted mean of the operations, variance sum(variance) / k^2), each with a 95 %
-- interval over prompts (Student's t).
CREATE OR REPLACE VIEW mlp_probe_curve AS
SELECT run_id, layer, operation, target, n,
       mlp_in, mlp_in - factor * sqrt(mlp_in_variance) AS mlp_in_low,
       mlp_in + factor * sqrt(mlp_in_variance) AS mlp_in_high,
       mlp_out, mlp_out - factor * sqrt(mlp_out_variance) AS mlp_out_low,
       mlp_out + factor * sqrt(mlp_out_variance) AS mlp_out_high,
       difference, difference - factor * sqrt(difference_variance) AS difference_low,
       difference + factor * sqrt(difference_variance) AS difference_high, model, status
FROM (
    SELECT run_id, layer, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, target,
           sum(n)::BIGINT AS n, student_factor(min(n)) AS factor,
           avg(mlp_in) AS mlp_in, avg(mlp_out) AS mlp_out, avg(difference) AS difference,
           CASE WHEN count(mlp_in_variance) = count(*) THEN sum(mlp_in_variance) / count(*) ** 2 END AS mlp_in_variance,
           CASE WHEN count(mlp_out_variance) = count(*) THEN sum(mlp_out_variance) / count(*) ** 2 END AS mlp_out_variance,
           CASE WHEN count(difference_variance) = count(*)
                THEN sum(difference_variance) / count(*) ** 2 END AS difference_variance
    FROM mlp_probe_operations
    GROUP BY GROUPING SETS ((run_id, layer, operation, target), (run_id, layer, target))
)
JOIN run_states USING (run_id);
