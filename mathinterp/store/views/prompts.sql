-- prompts: one row per prompt of every prompt set used. counterfactual: the same sentence with a neutral operator.
CREATE OR REPLACE VIEW prompts AS
SELECT prompts_fingerprint, prompt_id, text, answer, operation, template, operand_a, operand_b, counterfactual
FROM ${prompts};
