-- tuned_accuracy: accuracy (a fraction of scored tokens) of each tuned model per operation and over 'all' (unweighted mean of
-- the operations), and its gain over the original model. 95 % normal intervals clustered by prompt (ratio estimator), paired
-- for the gain; the accuracy's is cut to 0..1. Variance of sum x_i / sum n_i over G prompts: G/(G-1) * sum e_i^2 / (sum n_i)^2
-- with e_i = x_i - ratio * n_i; over 'all' sum(variance) / operations^2. p_value: two-sided normal p of gain = 0, at least
-- 2^(1 - moved), as flipping the signs of the prompts that moved would give; 1 where nothing changed.
CREATE OR REPLACE VIEW tuned_accuracy AS
SELECT run_id, condition, seed, layer, learning_rate, operation, n, baseline_accuracy, accuracy,
       greatest(accuracy - 1.959963984540054 * sqrt(variance), 0) AS low,
       least(accuracy + 1.959963984540054 * sqrt(variance), 1) AS high,
       gain, gain - 1.959963984540054 * sqrt(gain_variance) AS gain_low,
       gain + 1.959963984540054 * sqrt(gain_variance) AS gain_high,
       CASE WHEN gain = 0 THEN 1.0::DOUBLE
            WHEN gain_variance = 0 THEN 2.0::DOUBLE ** (1 - moved)
            WHEN gain_variance > 0 THEN greatest(erfc(abs(gain) / sqrt(2 * gain_variance)), 2.0::DOUBLE ** (1 - moved))
            END AS p_value
FROM (
    SELECT run_id, condition, seed, layer, learning_rate,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, sum(moved)::BIGINT AS moved, avg(baseline_accuracy) AS baseline_accuracy,
           avg(accuracy) AS accuracy, avg(gain) AS gain,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
           CASE WHEN count(gain_variance) = count(*) THEN sum(gain_variance) / count(*) ** 2 END AS gain_variance
    FROM (
        SELECT run_id, condition, seed, layer, learning_rate, operation, any_value(total) AS n,
               count_if(hits <> baseline_hits) AS moved,
               any_value(baseline_accuracy) AS baseline_accuracy, any_value(accuracy) AS accuracy,
               any_value(accuracy) - any_value(baseline_accuracy) AS gain,
               CASE WHEN count(*) > 1 THEN count(*) / (count(*) - 1.0) * sum((hits - accuracy * n) ** 2)
                   / any_value(total) ** 2 END AS variance,
               CASE WHEN count(*) > 1 THEN
                   count(*) / (count(*) - 1.0) * sum((hits - baseline_hits - (accuracy - baseline_accuracy) * n) ** 2)
                   / any_value(total) ** 2 END AS gain_variance
        FROM (
            SELECT *, sum(n) OVER here AS total, (sum(hits) OVER here)::DOUBLE / sum(n) OVER here AS accuracy,
                   (sum(baseline_hits) OVER here)::DOUBLE / sum(n) OVER here AS baseline_accuracy
            FROM tuned_prompts
            WINDOW here AS (PARTITION BY run_id, condition, seed, layer, learning_rate, operation)
        )
        GROUP BY run_id, condition, seed, layer, learning_rate, operation
    )
    GROUP BY GROUPING SETS ((run_id, condition, seed, layer, learning_rate, operation),
                            (run_id, condition, seed, layer, learning_rate))
);
