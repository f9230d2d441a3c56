-- mlp_probe: cosine similarity of each MLP's input and output at END, and of their difference, with the unembedding of a
-- target: the first digit token of operand A (a), operand B (b) or the answer (c) (paper B, section 4.2). The run's
-- parameters say which vectors these are: residual (before and after the MLP) or written, and whether the final norm is folded in.
CREATE OR REPLACE VIEW mlp_probe AS
SELECT run_id, layer, prompt_id, target, mlp_in, mlp_out, difference
FROM ${mlp_probe};
