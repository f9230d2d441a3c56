-- neuron_targets: the token that a prompt's importances are about, its log-probability (nats) at END, and what the model
-- predicts there. condition: 'original' or 'intervened'. correct: predicted_id is the first scored answer token.
CREATE OR REPLACE VIEW neuron_targets AS
SELECT run_id, prompt_id, condition, target_id, logprob, predicted_id, correct
FROM ${neuron_targets};
