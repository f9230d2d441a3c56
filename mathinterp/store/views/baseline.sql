-- baseline: every scored answer token under the unchanged model, computed in the batch shape of its own run's interventions.
-- correct: the most probable token is the gold one; logprob (natural log) and logit are those of the gold token.
CREATE OR REPLACE VIEW baseline AS
SELECT run_id, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${baseline};
