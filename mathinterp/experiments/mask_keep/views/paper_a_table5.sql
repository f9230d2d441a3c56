-- paper_a_table5: relative decrease of accuracy (a fraction) when the prompts' first k neurons are zeroed (mask) and when all other
-- neurons of the deep layers are (keep), and by how much the first k neurons' coefficients shrink under the intervention
-- (coef, a fraction), in the form of paper A, Tables 5, 15 and 19, with random neurons of the same layers beside them (mean over the
-- draws). prompts: those that count. Say WHERE cases = 'correct' (the paper's), 'flipped' or 'all', and scoring = 'token' or
-- 'first_token' (the token that neurons are ranked for).
CREATE OR REPLACE VIEW paper_a_table5 AS
SELECT run_id, cases, scoring, operation, k, prompts, mask, mask_low, mask_high, mask_random, keep, keep_low, keep_high,
       keep_random, coef
FROM (
    SELECT run_id, cases, scoring, operation, k, max(prompts) AS prompts,
           max(decrease) FILTER (mode = 'mask' AND ranking = 'top') AS mask,
           max(low) FILTER (mode = 'mask' AND ranking = 'top') AS mask_low,
           max(high) FILTER (mode = 'mask' AND ranking = 'top') AS mask_high,
           max(decrease) FILTER (mode = 'mask' AND ranking = 'random' AND seed IS NULL) AS mask_random,
           max(decrease) FILTER (mode = 'keep' AND ranking = 'top') AS keep,
           max(low) FILTER (mode = 'keep' AND ranking = 'top') AS keep_low,
           max(high) FILTER (mode = 'keep' AND ranking = 'top') AS keep_high,
           max(decrease) FILTER (mode = 'keep' AND ranking = 'random' AND seed IS NULL) AS keep_random
    FROM maskkeep_effects
    GROUP BY run_id, cases, scoring, operation, k
)
LEFT JOIN maskkeep_coefficients USING (run_id, cases, scoring, operation, k);
