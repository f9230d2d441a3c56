-- scored_baseline: the baseline tokens that count under the run's scoring, with their prompt's operation.
-- scoring: token (all scored tokens), first_token (position 0), exact_match (the prompt counts as one, right if all its tokens are).
-- operation is 'none' for prompts that name none. digits: decimal digits of the second operand, which in every
-- generated set, division and inverse subtraction included, has as many digits as the set.
CREATE OR REPLACE VIEW scored_baseline AS
SELECT b.run_id, b.prompt_id, b.position, b.correct, b.logprob, r.scoring,
       coalesce(p.operation, 'none') AS operation,
       CASE WHEN regexp_full_match(p.operand_b, '-?[0-9]+') THEN len(ltrim(p.operand_b, '-')) END AS digits
FROM baseline AS b
JOIN run_records AS r USING (run_id)
JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = b.prompt_id
WHERE r.scoring <> 'first_token' OR b.position = 0;
