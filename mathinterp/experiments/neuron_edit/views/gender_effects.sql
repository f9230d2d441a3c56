-- gender_effects: mean bias (nats) over the professions of a stereotype under each edit, and over 'all' (unweighted mean of
-- the two). change: bias - original; relative_change: change / original. 95 % intervals over professions (Student's t): variance of
-- a mean of n is sum of squares / (n (n - 1)), paired for the change; over 'all' sum(variance) / 4. p_value: of
-- change = 0, by the same t; 1 where nothing changed.
CREATE OR REPLACE VIEW gender_effects AS
SELECT run_id, edit, seed, stereotype, n, original,
       bias, bias - factor * sqrt(bias_variance) AS bias_low, bias + factor * sqrt(bias_variance) AS bias_high,
       change, change - factor * sqrt(variance) AS change_low,
       change + factor * sqrt(variance) AS change_high,
       change / nullif(original, 0) AS relative_change,
       CASE WHEN edit = 'original' THEN NULL
            ELSE mean_p(change, variance, professions) END AS p_value
FROM (
    SELECT run_id, edit, seed, CASE WHEN grouping(stereotype) = 1 THEN 'all' ELSE stereotype END AS stereotype,
           sum(n)::BIGINT AS n, min(n) AS professions, student_factor(min(n)) AS factor, avg(original) AS original, avg(bias) AS bias, avg(change) AS change,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
           CASE WHEN count(bias_variance) = count(*) THEN sum(bias_variance) / count(*) ** 2 END AS bias_variance
    FROM (
        SELECT run_id, edit, seed, stereotype, count(*) AS n, avg(original) AS original,
               avg(bias) AS bias, avg(change) AS change, var_samp(change) / count(*) AS variance,
               var_samp(bias) / count(*) AS bias_variance
        FROM gender_professions
        GROUP BY run_id, edit, seed, stereotype
    )
    GROUP BY GROUPING SETS ((run_id, edit, seed, stereotype), (run_id, edit, seed))
);
