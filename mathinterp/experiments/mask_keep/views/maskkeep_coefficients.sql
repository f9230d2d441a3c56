-- maskkeep_coefficients: how much smaller the coefficients of the prompts' first k neurons are on the other side of the neuron
-- scan, for example with the head zeroed: coef = mean (c - c_other) sign(c) / mean |c|, a fraction, over neurons and prompts that
-- count (see maskkeep_cases). Operation 'all' is the unweighted mean over operations. No rows for a scan that compared nothing.
CREATE OR REPLACE VIEW maskkeep_coefficients AS
SELECT run_id, cases, scoring, k, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, avg(coef) AS coef
FROM (
    SELECT run_id, cases, scoring, k, operation, sum(decrease) / nullif(sum(size), 0) AS coef
    FROM (
        SELECT ks.run_id, ks.k, r.prompt_id, sum((c - c_other) * sign(c)) AS decrease, sum(abs(c)) AS size
        FROM (
            SELECT m.run_id, n.prompt_id, n.rank,
                   CASE other_side WHEN 'intervened' THEN coefficient ELSE intervened_coefficient END::DOUBLE AS c,
                   CASE other_side WHEN 'intervened' THEN intervened_coefficient ELSE coefficient END::DOUBLE AS c_other
            FROM neuron_changes AS n
            JOIN maskkeep_runs AS m ON m.neurons_from = n.run_id
            WHERE intervened_coefficient IS NOT NULL
        ) AS r
        JOIN (SELECT DISTINCT run_id, k FROM maskkeep_scan) AS ks ON ks.run_id = r.run_id AND r.rank <= ks.k
        GROUP BY ks.run_id, ks.k, r.prompt_id
    )
    JOIN maskkeep_cases USING (run_id, prompt_id)
    GROUP BY run_id, cases, scoring, k, operation
)
GROUP BY GROUPING SETS ((run_id, cases, scoring, k, operation), (run_id, cases, scoring, k));
