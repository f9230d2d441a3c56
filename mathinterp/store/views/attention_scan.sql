-- attention_scan: what each head attends to from END (paper B, Figure 5): END's row of its attention matrix on the original
-- prompt, by token type: bos, operand_a, operand_b, operator, equals, other. mass: total weight on the type; the masses of a
-- head and prompt sum to 1. mean: weight per token, null where the prompt has no such token. tokens: how many it has.
-- argmax: the type holds the head's largest weight outside BOS, which as the attention sink never counts.
CREATE OR REPLACE VIEW attention_scan AS
SELECT run_id, layer, head, prompt_id, token_type, mean, mass, tokens, argmax
FROM ${attention_scan};
