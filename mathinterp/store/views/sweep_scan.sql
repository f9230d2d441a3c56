-- sweep_scan: scored answer tokens of the test prompts under each trial of a LoRA layer sweep, one (layer, learning_rate), with
-- the trial's own figures beside: losses (nats an answer token), accuracy of answer tokens on samples kept from training.
CREATE OR REPLACE VIEW sweep_scan AS
SELECT run_id, layer, learning_rate, training_loss, validation_loss, validation_accuracy, trained_parameters, seconds,
       prompt_id, position, correct, logprob, logit, predicted_id
FROM ${sweep_scan};
