-- mlp_effects: what ablating each layer's MLP costs; columns as in head_effects, q_value over the run's layers.
-- Adaptive runs (--decide) are not here but in mlp_decisions.
CREATE OR REPLACE VIEW mlp_effects AS
SELECT run_id, layer, operation, n, baseline_accuracy, accuracy, drop, drop_low, drop_high, relative_drop,
       p_value, q_value, logprob_change, joint_q, sure, prompts, noise, logprob_low, logprob_high,
       baseline_prompt_accuracy, prompt_accuracy, model, status
FROM ablation_effects
JOIN run_states USING (run_id)
WHERE node = 'mlp';
