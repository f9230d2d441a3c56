-- ablated_tokens: the rows of head_scan and mlp_scan under one name. node: 'head' or 'mlp'; head is null for an MLP.
CREATE OR REPLACE VIEW ablated_tokens AS
SELECT 'head' AS node, run_id, layer, head, prompt_id, position, correct, logprob FROM head_scan
UNION ALL
SELECT 'mlp' AS node, run_id, layer, NULL::SMALLINT AS head, prompt_id, position, correct, logprob FROM mlp_scan;
