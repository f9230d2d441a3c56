-- prompts: one row per prompt of every prompt set used. counterfactual: the same sentence with a neutral operator, or the one
-- given. extra: the further fields that the prompt was given with, as JSON: extra ->> 'speaker' (null: none); distractor and
-- token_types are among them. The last ones given for the same prompts are kept.
CREATE OR REPLACE VIEW prompts AS
SELECT p.prompts_fingerprint, p.prompt_id, text, answer, operation, template, operand_a, operand_b, counterfactual, extra
FROM ${prompts} AS p
LEFT JOIN (
    SELECT prompts_fingerprint, prompt_id, json_group_object(name, value) AS extra
    FROM ${prompt_columns}
    GROUP BY prompts_fingerprint, prompt_id
) AS c ON c.prompts_fingerprint = p.prompts_fingerprint AND c.prompt_id = p.prompt_id;
