-- path_scan: one row per patched node and pair (paper B, Algorithm 1; method.md section 3). node: 'head' or 'mlp' (head is
-- null). logit_original, logit_patched: of the answer's first digit on X_r, without and with the node as on X_c. effect: under
-- the run's measure (parameters.effect): logit and centred relative to the original, probability and logprob the change.
CREATE OR REPLACE VIEW path_scan AS
SELECT run_id, node, layer, head, prompt_id, logit_original, logit_patched, effect, logprob_change, probability_change, centred_change
FROM ${path_scan};
