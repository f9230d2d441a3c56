-- maskkeep_scan: every scored answer token with neurons of its prompt's own zeroed at every position. mode: mask (k neurons
-- are zeroed) or keep (all other neurons of the deep layers are; earlier layers stay whole). ranking: top (the prompt's first
-- k in the neuron scan that the run's parameter neurons_from names) or random (as many, in the same layers; seed numbers the
-- draws). The unchanged model is in the view baseline. Which neurons: maskkeep_neurons.
CREATE OR REPLACE VIEW maskkeep_scan AS
SELECT run_id, mode, ranking, seed, k, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${maskkeep_scan};
