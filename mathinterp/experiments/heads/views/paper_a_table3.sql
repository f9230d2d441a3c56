-- paper_a_table3: relative decrease (a fraction) of accuracy on answer tokens that need no carry or borrow (memorize) against those
-- that do (change-one), for + and -, in the form of paper A, Table 3. n: tokens; original and accuracy: fractions. Always token by token,
-- whatever the run's scoring.
CREATE OR REPLACE VIEW paper_a_table3 AS
SELECT run_id, rank, component AS head, operation, carry_class, count(*) AS n,
       avg(b.correct::INTEGER) AS original,
       avg(a.correct::INTEGER) AS accuracy,
       (sum(b.correct::INTEGER) - sum(a.correct::INTEGER)) / nullif(sum(b.correct::INTEGER), 0) AS decrease,
       any_value(model) AS model, any_value(status) AS status
FROM head_scan AS a
JOIN (
    SELECT s.run_id, s.prompt_id, s.position, s.correct, p.operation, t.carry_class
    FROM baseline AS s
    JOIN run_records AS r USING (run_id)
    JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
    JOIN answer_tokens AS t ON t.prompts_fingerprint = r.prompts_fingerprint AND t.prompt_id = s.prompt_id
                           AND t.position = s.position
    WHERE p.operation IN ('add', 'sub') AND t.carry_class IS NOT NULL
) AS b USING (run_id, prompt_id, position)
JOIN head_ranks USING (run_id, layer, head)
JOIN run_states USING (run_id)
GROUP BY run_id, rank, component, operation, carry_class;
