-- neuron_prompts: the neurons stored for each prompt, both conditions in one row; see neuron_scan for which are stored.
-- change = original - intervened, or tuned - original where another model was compared; null where nothing was.
CREATE OR REPLACE VIEW neuron_prompts AS
SELECT stored.run_id, prompt_id, operation, layer, unit AS neuron, importance, intervened_importance,
       (intervened_importance - importance) * change_sign AS change,
       coefficient, intervened_coefficient, (intervened_coefficient - coefficient) * change_sign AS coefficient_change
FROM ${neuron_scan} AS stored
JOIN neuron_runs USING (run_id)
WHERE node = 'neuron' AND prompt_id IS NOT NULL;
