-- edit_scan: scored answer tokens of each prompt with a set of neurons zeroed. edit: 'original' (none), 'edited' (the run's
-- neurons) or 'random' (as many others in each layer, drawn with `seed`).
CREATE OR REPLACE VIEW edit_scan AS
SELECT run_id, edit, seed, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${edit_scan};
