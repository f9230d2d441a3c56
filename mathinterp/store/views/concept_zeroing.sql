-- concept_zeroing: every scored answer token with a whole set of neurons at zero. neurons: concepts (kept at the level by
-- the concept scan that the run's parameters name as source) or random (as many others in each layer); zeroed: how many.
CREATE OR REPLACE VIEW concept_zeroing AS
SELECT run_id, neurons, level, seed, zeroed, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${concept_zeroing};
