-- concept_zeroing_prompts: per zeroed set and prompt, the units that count (n), those right without (baseline_hits) and
-- with the set at zero (hits), and the summed change of log-probability. The unit is a scored token, or the whole answer
-- under exact_match.
CREATE OR REPLACE VIEW concept_zeroing_prompts AS
SELECT run_id, neurons, level, seed, zeroed, operation, prompt_id,
       CASE WHEN whole THEN 1 ELSE tokens END AS n,
       CASE WHEN whole THEN (baseline_right = tokens)::INTEGER ELSE baseline_right END AS baseline_hits,
       CASE WHEN whole THEN (zeroed_right = tokens)::INTEGER ELSE zeroed_right END AS hits,
       logprob_change
FROM (
    SELECT z.run_id, z.neurons, z.level, z.seed, z.prompt_id,
           any_value(z.zeroed) AS zeroed,
           any_value(b.operation) AS operation, any_value(b.scoring) = 'exact_match' AS whole,
           count(*)::INTEGER AS tokens,
           sum(b.correct::INTEGER)::INTEGER AS baseline_right,
           sum(z.correct::INTEGER)::INTEGER AS zeroed_right,
           sum(z.logprob::DOUBLE - b.logprob::DOUBLE) AS logprob_change
    FROM concept_zeroing AS z
    JOIN scored_baseline AS b USING (run_id, prompt_id, position)
    GROUP BY z.run_id, z.neurons, z.level, z.seed, z.prompt_id
);
