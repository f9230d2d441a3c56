-- knockout_scan: every scored answer token with k heads knocked out together. ranking: effect (the first k of the run's
-- ranking), random, or random_layer (as many in each layer as the first k have there); seed numbers the random draws.
-- No rows for k = 0: that is the view baseline. Which heads: knockout_heads.
CREATE OR REPLACE VIEW knockout_scan AS
SELECT run_id, ranking, seed, k, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${knockout_scan};
