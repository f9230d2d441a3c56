-- knockout_prompts: per point of a knock-out curve and prompt, the units that count (n), those that are right (hits) and
-- their summed log-probability. The unit is a scored token, or the whole answer under exact_match; k = 0 is the baseline.
CREATE OR REPLACE VIEW knockout_prompts AS
SELECT run_id, ranking, seed, k, operation, prompt_id,
       CASE WHEN whole THEN 1 ELSE tokens END AS n,
       CASE WHEN whole THEN (correct_tokens = tokens)::INTEGER ELSE correct_tokens END AS hits,
       logprob
FROM (
    SELECT t.run_id, t.ranking, t.seed, t.k, t.prompt_id,
           any_value(b.operation) AS operation, any_value(b.scoring) = 'exact_match' AS whole,
           count(*)::INTEGER AS tokens,
           sum(t.correct::INTEGER)::INTEGER AS correct_tokens,
           sum(t.logprob::DOUBLE) AS logprob
    FROM (
        SELECT run_id, ranking, seed, k, prompt_id, position, correct, logprob FROM knockout_scan
        UNION ALL
        SELECT run_id, ranking, seed, 0::SMALLINT AS k, prompt_id, position, correct, logprob
        FROM baseline
        JOIN (SELECT DISTINCT run_id, ranking, seed FROM knockout_scan) USING (run_id)
    ) AS t
    JOIN scored_baseline AS b USING (run_id, prompt_id, position)
    GROUP BY t.run_id, t.ranking, t.seed, t.k, t.prompt_id
);
