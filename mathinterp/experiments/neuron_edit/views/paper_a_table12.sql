-- paper_a_table12: gender bias (nats) before and after the edit, in the form of paper A's section 6.2: per stereotype and over
-- 'all'. relative_change: a fraction of the original bias. random_*: the same for as many random neurons in the same layers, mean, least
-- and most over the draws. loss_change, random_loss_change: nats a token on ordinary text.
CREATE OR REPLACE VIEW paper_a_table12 AS
SELECT run_id, stereotype, e.original, e.bias AS edited, e.change, e.change_low, e.change_high,
       e.relative_change, e.p_value,
       r.bias AS random, r.relative AS random_relative_change, r.lowest AS random_lowest,
       r.highest AS random_highest, r.draws, t.loss_change, t.perplexity_ratio, u.loss_change AS random_loss_change
FROM (SELECT * FROM gender_effects WHERE edit = 'edited') AS e
LEFT JOIN (
    SELECT run_id, stereotype, count(*) AS draws, avg(bias) AS bias, avg(relative_change) AS relative,
           min(relative_change) AS lowest, max(relative_change) AS highest
    FROM gender_effects
    WHERE edit = 'random'
    GROUP BY run_id, stereotype
) AS r USING (run_id, stereotype)
LEFT JOIN (SELECT run_id, loss_change, perplexity_ratio FROM edit_perplexity WHERE edit = 'edited') AS t USING (run_id)
LEFT JOIN (SELECT run_id, avg(loss_change) AS loss_change FROM edit_perplexity WHERE edit = 'random' GROUP BY run_id) AS u
    USING (run_id);
