-- head_scan: every scored answer token with one attention head ablated (paper A, section 3). Columns as in baseline.
CREATE OR REPLACE VIEW head_scan AS
SELECT run_id, layer, head, prompt_id, position, correct, logprob, logit, predicted_id
FROM ${head_scan};
