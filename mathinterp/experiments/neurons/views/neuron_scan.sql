-- neuron_scan: importance (nats) and coefficient at END of the neurons stored for each prompt (method.md section 5).
-- Stored are the first `top` of each layer by the run's ranking, or all with --keep all; see neuron_changes for the
-- first over all layers together. condition: 'original' or 'intervened'.
CREATE OR REPLACE VIEW neuron_scan AS
SELECT run_id, prompt_id, 'original' AS condition, layer, unit AS neuron, importance, coefficient
FROM ${neuron_scan}
WHERE node = 'neuron' AND prompt_id IS NOT NULL
UNION ALL
SELECT run_id, prompt_id, 'intervened' AS condition, layer, unit AS neuron, intervened_importance, intervened_coefficient
FROM ${neuron_scan}
WHERE node = 'neuron' AND prompt_id IS NOT NULL AND intervened_importance IS NOT NULL;
