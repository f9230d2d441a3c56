-- paper_b_figure5: what each head attends to from END, one row per operation and head, in the form of paper B, Figure 5. The
-- columns of token types are attention weights per token (of 1), null where no prompt has the type. looks_at: the type that
-- most often holds the largest weight outside BOS, in looks_at_share (a fraction) of the prompts.
CREATE OR REPLACE VIEW paper_b_figure5 AS
SELECT run_id, operation, layer || '.' || head AS head,
       max(mean) FILTER (token_type = 'bos') AS bos,
       max(mean) FILTER (token_type = 'operand_a') AS operand_a,
       max(mean) FILTER (token_type = 'operator') AS operator,
       max(mean) FILTER (token_type = 'operand_b') AS operand_b,
       max(mean) FILTER (token_type = 'equals') AS equals,
       max(mean) FILTER (token_type = 'other') AS other,
       first(token_type ORDER BY argmax_share DESC, token_type) AS looks_at,
       max(argmax_share) AS looks_at_share,
       any_value(model) AS model, any_value(status) AS status
FROM attention_by_type
GROUP BY run_id, operation, layer, head;
