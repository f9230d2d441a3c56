-- head_pairs: per pair of heads (or head and the run's given heads) and operation: the drop of accuracy with both out, with
-- each out alone, and interaction = drop_both - drop_first - drop_second (fractions, -2 to 2), with a 95 % interval and p as
-- head_effects has them for a drop (here for half the interaction, which is between -1 and 1, and the tokens of a prompt added
-- up first), and Benjamini-Hochberg q over the pairs of one run and operation. Operation 'all' is the unweighted mean over
-- operations. An interaction above 0: one head stands in for the other. noise: the share of answers whose
-- prediction a change of nothing flips (runs.notes). sure: q_value < 0.05 and abs(interaction) > 3 * noise, as three drops are in
-- it; null where only the noise is not known.
CREATE OR REPLACE VIEW head_pairs AS
WITH units AS (
    SELECT s.run_id, s.layer, s.head, s.other_layer, s.other_head, s.given, b.operation, s.prompt_id,
           CASE WHEN any_value(b.scoring) = 'exact_match' THEN 1 ELSE count(*) END AS n,
           CASE WHEN any_value(b.scoring) = 'exact_match' THEN bool_and(b.correct)::INTEGER ELSE count_if(b.correct) END AS base,
           CASE WHEN any_value(b.scoring) = 'exact_match' THEN bool_and(s.correct)::INTEGER ELSE count_if(s.correct) END AS hits
    FROM head_pair_scan AS s JOIN scored_baseline AS b USING (run_id, prompt_id, position)
    GROUP BY ALL
), together AS (
    SELECT * FROM units WHERE layer IS NOT NULL AND (other_layer IS NOT NULL OR given)
), prompts_of_pairs AS (
    SELECT t.run_id, t.layer, t.head, t.other_layer, t.other_head, t.operation, t.n,
           t.base - t.hits AS lost_both, t.base - f.hits AS lost_first, t.base - s.hits AS lost_second
    FROM together AS t
    JOIN units AS f ON f.run_id = t.run_id AND f.prompt_id = t.prompt_id AND f.layer = t.layer AND f.head = t.head
        AND f.other_layer IS NULL AND NOT f.given
    JOIN units AS s ON s.run_id = t.run_id AND s.prompt_id = t.prompt_id AND s.layer IS NOT DISTINCT FROM t.other_layer
        AND s.head IS NOT DISTINCT FROM t.other_head AND s.other_layer IS NULL AND s.given = t.given
), operations AS (
    SELECT run_id, layer, head, other_layer, other_head, operation, sum(n)::BIGINT AS n,
           sum(lost_both) / sum(n) AS drop_both, sum(lost_first) / sum(n) AS drop_first, sum(lost_second) / sum(n) AS drop_second,
           score_part(greatest(lost_both - lost_first - lost_second, 0) / 2, greatest(lost_first + lost_second - lost_both, 0) / 2,
                      n) AS part
    FROM prompts_of_pairs GROUP BY ALL
), effects AS (
    SELECT run_id, layer, head, other_layer, other_head,
           CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, sum(n)::BIGINT AS n,
           avg(drop_both) AS drop_both, avg(drop_first) AS drop_first,
           avg(drop_second) AS drop_second, avg(drop_both - drop_first - drop_second) AS interaction,
           list(part ORDER BY operation) AS parts
    FROM operations
    GROUP BY GROUPING SETS ((run_id, layer, head, other_layer, other_head, operation),
                            (run_id, layer, head, other_layer, other_head))
), tested AS (
    SELECT *, score_p(interaction / 2, parts) AS p_value FROM effects
), ranked AS (
    SELECT *, count(*) OVER (PARTITION BY run_id, operation) AS tests,
           count(*) OVER (PARTITION BY run_id, operation ORDER BY p_value) AS rank
    FROM tested
)
SELECT run_id, layer, head, other_layer, other_head, layer || '.' || head AS first,
       coalesce(other_layer || '.' || other_head, 'given') AS second,
       layer || '.' || head || ' + ' || coalesce(other_layer || '.' || other_head, 'given') AS pair, operation, n,
       drop_both, drop_first, drop_second, interaction,
       2 * score_bound(interaction / 2, parts, -1) AS interaction_low,
       2 * score_bound(interaction / 2, parts, 1) AS interaction_high, p_value,
       min(p_value * tests / rank) OVER (PARTITION BY run_id, operation ORDER BY p_value DESC) AS q_value,
       coalesce(q_value < 0.05, false) AND abs(interaction) > 3 * noise AS sure, noise, model, status
FROM ranked
LEFT JOIN noise_shares USING (run_id)
JOIN run_states USING (run_id);
