-- mlp_scan: every scored answer token with one layer's whole MLP ablated. Columns as in baseline.
CREATE OR REPLACE VIEW mlp_scan AS
SELECT run_id, layer, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${mlp_scan};
