-- prune_scan: scored answer tokens under each condition of a pruning experiment: lora (LoRA, nothing pruned), pruned and random
-- (deep layers pruned to the chosen, or to as many random neurons), pruned_lora and random_lora (and a LoRA trained on that).
-- The original model is the run's baseline. seed: of the random draw.
CREATE OR REPLACE VIEW prune_scan AS
SELECT run_id, condition, seed, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${prune_scan};
