-- head_effects: what ablating each head costs, per operation and over 'all' (unweighted mean of the operations).
-- Accuracies are fractions; drop = baseline_accuracy - accuracy; relative_drop = drop / baseline_accuracy (paper A, Tables 2-3).
-- n: units scored (tokens; whole answers under exact_match). drop_low, drop_high: 95 % interval, paired with the run's own
-- baseline and clustered by prompt; p_value and it are one procedure. q_value: Benjamini-Hochberg over the run's heads, each
-- operation a family of its own; joint_q: over heads and operations together. sure: q_value < 0.05 and the drop exceeds noise,
-- the share of predictions that a change of nothing flips (null, as sure then is, where a run did not note it). prompts: those of the smallest operation; under 12 the interval is
-- rough. logprob_change: mean per unit, natural log, with its 95 % interval.
-- Adaptive runs (--decide) are not here but in head_decisions.
-- prompt_accuracy, baseline_prompt_accuracy: prompts of which every counted token is right. model, status: of the run; effects of a
-- run that is not 'finished' are of the shards that are there by chance.
CREATE OR REPLACE VIEW head_effects AS
SELECT run_id, layer, head, operation, n, baseline_accuracy, accuracy, drop, drop_low, drop_high, relative_drop,
       p_value, q_value, logprob_change, joint_q, sure, prompts, noise, logprob_low, logprob_high,
       baseline_prompt_accuracy, prompt_accuracy, model, status
FROM ablation_effects
JOIN run_states USING (run_id)
WHERE node = 'head';
