-- gender_effects: mean bias (nats) over the professions of a stereotype under each edit, and over 'all' (unweighted mean of
-- the two). change: bias - original; relative_change: change / original. 95 % normal intervals over professions: variance of
-- a mean of n is sum of squares / (n (n - 1)), paired for the change; over 'all' sum(variance) / 4. p_value: two-sided normal
-- p of change = 0, at least 2^(1 - n), as flipping the professions' signs would give; 1 where nothing changed.
CREATE OR REPLACE VIEW gender_effects AS
SELECT run_id, edit, seed, stereotype, n, original,
       bias, bias - 1.959963984540054 * sqrt(bias_variance) AS bias_low, bias + 1.959963984540054 * sqrt(bias_variance) AS bias_high,
       change, change - 1.959963984540054 * sqrt(variance) AS change_low,
       change + 1.959963984540054 * sqrt(variance) AS change_high,
       change / nullif(original, 0) AS relative_change,
       CASE WHEN edit = 'original' THEN NULL
            WHEN change = 0 THEN 1.0::DOUBLE
            WHEN variance = 0 THEN 2.0::DOUBLE ** (1 - moved)
            WHEN variance > 0 THEN greatest(erfc(abs(change) / sqrt(2 * variance)), 2.0::DOUBLE ** (1 - moved)) END AS p_value
FROM (
    SELECT run_id, edit, seed, CASE WHEN grouping(stereotype) = 1 THEN 'all' ELSE stereotype END AS stereotype,
           sum(n)::BIGINT AS n, sum(moved)::BIGINT AS moved, avg(original) AS original, avg(bias) AS bias, avg(change) AS change,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
           CASE WHEN count(bias_variance) = count(*) THEN sum(bias_variance) / count(*) ** 2 END AS bias_variance
    FROM (
        SELECT run_id, edit, seed, stereotype, count(*) AS n, count_if(change <> 0) AS moved, avg(original) AS original,
               avg(bias) AS bias, avg(change) AS change, var_samp(change) / count(*) AS variance,
               var_samp(bias) / count(*) AS bias_variance
        FROM gender_professions
        GROUP BY run_id, edit, seed, stereotype
    )
    GROUP BY GROUPING SETS ((run_id, edit, seed, stereotype), (run_id, edit, seed))
);
