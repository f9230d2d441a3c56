-- knockout_curve: accuracy (a fraction) with k heads knocked out, per operation and over 'all' (unweighted mean of the
-- operations). low, high: 95 % normal interval, clustered by prompt and cut to 0..1; null for a single prompt. It is the
-- uncertainty over prompts alone: that over random heads is the spread over seeds (knockout_bands).
-- Variance of accuracy = sum h_i / sum n_i over G prompts (h_i right units of n_i): G/(G-1) * sum e_i^2 / (sum n_i)^2 with
-- e_i = h_i - accuracy * n_i, the sum of squares written in whole numbers; over 'all' it is sum(variance) / operations^2.
-- logprob: mean per unit, natural log.
CREATE OR REPLACE VIEW knockout_curve AS
SELECT run_id, ranking, seed, k, operation, n, accuracy,
       CASE WHEN variance IS NOT NULL THEN greatest(accuracy - 1.959963984540054 * sqrt(variance), 0) END AS low,
       CASE WHEN variance IS NOT NULL THEN least(accuracy + 1.959963984540054 * sqrt(variance), 1) END AS high,
       logprob, model, status
FROM (
    SELECT run_id, ranking, seed, k,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n,
           avg(hits / n) AS accuracy,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
           avg(logprob / n) AS logprob
    FROM (
        SELECT *, CASE WHEN prompts > 1 THEN
                   prompts / (prompts - 1)
                   * ((n::HUGEINT * n * hh - 2 * n::HUGEINT * hits * hn + hits::HUGEINT * hits * nn)::DOUBLE / n::DOUBLE ** 4)
               END AS variance
        FROM (
            SELECT run_id, ranking, seed, k, operation,
                   count(*) AS prompts,
                   sum(n)::BIGINT AS n,
                   sum(hits)::BIGINT AS hits,
                   sum(hits * hits)::HUGEINT AS hh,
                   sum(hits * n)::HUGEINT AS hn,
                   sum(n * n)::HUGEINT AS nn,
                   sum(logprob) AS logprob
            FROM knockout_prompts
            GROUP BY run_id, ranking, seed, k, operation
        )
    )
    GROUP BY GROUPING SETS ((run_id, ranking, seed, k, operation), (run_id, ranking, seed, k))
)
JOIN run_states USING (run_id);
