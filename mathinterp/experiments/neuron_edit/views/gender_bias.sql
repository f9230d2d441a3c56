-- gender_bias: per edit, profession and sentence, log p(profession) after the gender it is stereotyped as and after the other
-- (nats, summed over the profession's tokens); bias is their difference.
CREATE OR REPLACE VIEW gender_bias AS
SELECT run_id, edit, seed, stereotype, profession, template,
       sum(logprob) FILTER (gender = stereotype) AS logprob_stereotyped,
       sum(logprob) FILTER (gender <> stereotype) AS logprob_other,
       sum(CASE WHEN gender = stereotype THEN logprob ELSE -logprob END) AS bias
FROM (
    SELECT e.run_id, e.edit, e.seed, p.operation AS stereotype, p.operand_a AS gender, p.operand_b AS profession, p.template,
           e.logprob::DOUBLE AS logprob
    FROM edit_scan AS e
    JOIN run_records AS r USING (run_id)
    JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = e.prompt_id
    WHERE p.operation IN ('woman', 'man') AND p.operand_a IN ('woman', 'man')
)
GROUP BY run_id, edit, seed, stereotype, profession, template;
