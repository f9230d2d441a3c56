-- maskkeep_effects: what masking a prompt's k neurons, or keeping them alone, costs; per operation and over 'all' (unweighted
-- mean of the operations). decrease: relative decrease of accuracy, (original - changed) / original, a fraction; of 'all' it is
-- that of the mean accuracies. low, high: its 95 % interval, paired with the run's baseline and clustered by prompt, the wider of
-- Student's t and the score interval of the drop (docs/statistics.md); high is cut at 1, all of the accuracy (not that of an excess). cases, scoring: see maskkeep_cases; ranking, seed: see maskkeep_curves (seed null:
-- mean over the draws; excess: top minus random, and no accuracy of its own). logprob_change: mean per unit, nats.
-- Variance of decrease R over operations o of N_o units, G_o prompts, with lost d_i and right h_i of n_i: with u_i = d_i - R h_i
-- and r_o = sum u_i / N_o it is sum_o G/(G-1) sum (u_i - r_o n_i)^2 / N_o^2 / (operations * original)^2.
CREATE OR REPLACE VIEW maskkeep_effects AS
SELECT run_id, cases, scoring, mode, ranking, seed, k, operation, prompts, n, baseline_accuracy,
       CASE WHEN ranking <> 'excess' THEN baseline_accuracy - drop END AS accuracy, decrease,
       least(decrease - factor * sqrt(variance), score_bound(drop, parts, -1) / nullif(baseline_accuracy, 0)) AS low,
       CASE WHEN baseline_accuracy > 0 THEN
           least(greatest(decrease + factor * sqrt(variance), score_bound(drop, parts, 1) / baseline_accuracy),
                 CASE WHEN ranking <> 'excess' THEN 1 END) END AS high,
       logprob_change, model, status
FROM (
    SELECT run_id, cases, scoring, mode, ranking, seed, k, scope AS operation,
           sum(prompts)::BIGINT AS prompts, student_factor(min(prompts)) AS factor, sum(n)::BIGINT AS n,
           any_value(baseline_accuracy) AS baseline_accuracy, any_value(drop) AS drop, any_value(decrease) AS decrease,
           list(part ORDER BY own) AS parts,
           CASE WHEN count(variance) = count(*) THEN
               sum(variance) / count(*) ** 2 / nullif(any_value(baseline_accuracy), 0) ** 2 END AS variance,
           avg(change / n) AS logprob_change
    FROM (
        SELECT *, CASE WHEN prompts > 1 THEN
                   prompts / (prompts - 1) * greatest(dd - 2 * decrease * dh + decrease ** 2 * hh
                                                      - 2 * rest * (dn - decrease * hn) + rest ** 2 * nn, 0) / n ** 2
               END AS variance
        FROM (
            SELECT *, (d - decrease * h) / n AS rest
            FROM (
                SELECT *, drop / nullif(baseline_accuracy, 0) AS decrease
                FROM (
                    SELECT *, avg(h / n) OVER scopes AS baseline_accuracy, avg(d / n) OVER scopes AS drop
                    FROM (
                        SELECT run_id, cases, scoring, mode, ranking, seed, k, operation AS own,
                               unnest([operation, 'all']) AS scope,
                               count(*) AS prompts,
                               sum(n)::DOUBLE AS n, sum(baseline_hits)::DOUBLE AS h, sum(lost) AS d,
                               sum(lost * lost) AS dd, sum(lost * baseline_hits) AS dh, sum(baseline_hits * baseline_hits) AS hh,
                               sum(lost * n) AS dn, sum(baseline_hits * n) AS hn, sum(n * n) AS nn,
                               sum(logprob_change) AS change,
                               score_part(greatest(lost, 0), greatest(-lost, 0), n) AS part
                        FROM maskkeep_curves
                        GROUP BY run_id, cases, scoring, mode, ranking, seed, k, operation
                    )
                    WINDOW scopes AS (PARTITION BY run_id, cases, scoring, mode, ranking, seed, k, scope)
                )
            )
        )
    )
    GROUP BY run_id, cases, scoring, mode, ranking, seed, k, scope
)
JOIN run_states USING (run_id);
