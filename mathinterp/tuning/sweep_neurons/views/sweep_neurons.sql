-- sweep_neurons: per adapter of a sweep and prompt the neurons whose importance (nats) it enhanced most, all layers ranked
-- together, rank 1 first, with importance and coefficient at END of the original and the tuned model (method.md section 5).
CREATE OR REPLACE VIEW sweep_neurons AS
SELECT run_id, tuned_layer, learning_rate, prompt_id, rank, layer, neuron, importance, tuned_importance,
       tuned_importance - importance AS change, coefficient, tuned_coefficient
FROM ${sweep_neurons};
