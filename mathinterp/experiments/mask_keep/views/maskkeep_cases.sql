-- maskkeep_cases: the prompts that count. scoring: token (all scored tokens), first_token (the first: the one that neurons are
-- ranked for) or exact_match (the prompt counts as one, right if all its tokens are). n: units that count; baseline_hits:
-- those right in the unchanged model. cases: all; correct (all units right); flipped (correct, and the first token wrong on
-- the other side of the neuron scan, for example with the head zeroed).
CREATE OR REPLACE VIEW maskkeep_cases AS
SELECT run_id, cases, scoring, prompt_id, operation, n, baseline_hits
FROM (
    SELECT *, unnest(['correct', 'flipped', 'all']) AS cases
    FROM (
        SELECT run_id, scoring, prompt_id, operation, flips,
               CASE scoring WHEN 'token' THEN tokens ELSE 1 END AS n,
               CASE scoring WHEN 'token' THEN tokens_right
                            WHEN 'first_token' THEN first_right
                            ELSE (tokens_right = tokens)::INTEGER END AS baseline_hits
        FROM (
            SELECT b.run_id, b.prompt_id, any_value(b.operation) AS operation,
                   unnest(['token', 'first_token', 'exact_match']) AS scoring,
                   coalesce(any_value(NOT t.correct), false) AS flips,
                   count(*)::INTEGER AS tokens,
                   sum(b.correct::INTEGER)::INTEGER AS tokens_right,
                   max(b.correct::INTEGER) FILTER (b.position = 0) AS first_right
            FROM scored_baseline AS b
            JOIN maskkeep_runs AS r USING (run_id)
            LEFT JOIN neuron_targets AS t
              ON t.run_id = r.neurons_from AND t.prompt_id = b.prompt_id AND t.condition = r.other_side
            GROUP BY b.run_id, b.prompt_id
        )
    )
)
WHERE cases = 'all' OR (baseline_hits = n AND (cases = 'correct' OR flips));
