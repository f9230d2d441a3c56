-- lora_sweep_trials: every trial of a layer sweep. chosen: its learning rate did best for its layer on the samples kept from
-- training (ties: the lower loss, then the lower rate). accuracy: of the test prompts, mean over operations.
CREATE OR REPLACE VIEW lora_sweep_trials AS
SELECT run_id, layer, learning_rate,
       row_number() OVER (PARTITION BY run_id, layer
                          ORDER BY validation_accuracy DESC, validation_loss, learning_rate) = 1 AS chosen,
       validation_accuracy, validation_loss, training_loss, a.accuracy, a.low, a.high, trained_parameters, seconds
FROM (SELECT DISTINCT run_id, layer, learning_rate, training_loss, validation_loss, validation_accuracy, trained_parameters,
             seconds FROM sweep_scan) AS t
JOIN tuned_accuracy AS a USING (run_id, layer, learning_rate)
WHERE a.operation = 'all';
