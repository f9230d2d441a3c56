-- knockout_curve: accuracy (a fraction) with k heads knocked out, per operation and over 'all' (unweighted mean of the
-- operations). low, high: 95 % interval of a share, clustered by prompt (share_part in functions.sql). It is the uncertainty over
-- prompts alone: that over random heads is the spread over seeds (knockout_bands). logprob: mean per unit, natural log.
CREATE OR REPLACE VIEW knockout_curve AS
SELECT run_id, ranking, seed, k, operation, n, accuracy,
       share_bound(accuracy, parts, -1) AS low, share_bound(accuracy, parts, 1) AS high, logprob, model, status
FROM (
    SELECT run_id, ranking, seed, k,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, avg(accuracy) AS accuracy, list(part ORDER BY operation) AS parts, avg(logprob) AS logprob
    FROM (
        SELECT run_id, ranking, seed, k, operation, sum(n) AS n, sum(hits) / sum(n) AS accuracy,
               share_part(hits, n) AS part, sum(logprob) / sum(n) AS logprob
        FROM knockout_prompts
        GROUP BY run_id, ranking, seed, k, operation
    )
    GROUP BY GROUPING SETS ((run_id, ranking, seed, k, operation), (run_id, ranking, seed, k))
)
JOIN run_states USING (run_id);
