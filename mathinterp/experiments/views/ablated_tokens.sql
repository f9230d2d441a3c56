-- ablated_tokens: the rows of head_scan and mlp_scan under one name. node: 'head' or 'mlp'; head is null for an MLP.
-- Adaptive runs (--decide) are left out, here and in all effects and rankings made from this: their heads stopped at different
-- prompts, by what these said. See head_decisions and mlp_decisions.
CREATE OR REPLACE VIEW ablated_tokens AS
SELECT 'head' AS node, run_id, layer, head, prompt_id, position, correct, logprob FROM head_scan
WHERE run_id NOT IN (SELECT run_id FROM run_records WHERE adaptive)
UNION ALL
SELECT 'mlp' AS node, run_id, layer, NULL::SMALLINT AS head, prompt_id, position, correct, logprob FROM mlp_scan
WHERE run_id NOT IN (SELECT run_id FROM run_records WHERE adaptive);
