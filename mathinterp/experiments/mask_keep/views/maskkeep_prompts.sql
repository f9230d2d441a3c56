-- maskkeep_prompts: per mode, ranking, seed, k and prompt that counts (see maskkeep_cases): units that count (n), those right
-- in the unchanged model (baseline_hits) and with neurons zeroed (hits), and the summed change of log-probability (nats).
CREATE OR REPLACE VIEW maskkeep_prompts AS
SELECT run_id, cases, scoring, mode, ranking, seed, k, operation, prompt_id, n, baseline_hits,
       CASE scoring WHEN 'token' THEN tokens_right
                    WHEN 'first_token' THEN first_right
                    ELSE (tokens_right = tokens)::INTEGER END AS hits,
       CASE scoring WHEN 'first_token' THEN first_change ELSE change END AS logprob_change
FROM (
    SELECT s.run_id, s.mode, s.ranking, s.seed, s.k, s.prompt_id,
           count(*)::INTEGER AS tokens,
           sum(s.correct::INTEGER)::INTEGER AS tokens_right,
           max(s.correct::INTEGER) FILTER (position = 0) AS first_right,
           sum(s.logprob::DOUBLE - b.logprob::DOUBLE) AS change,
           sum(s.logprob::DOUBLE - b.logprob::DOUBLE) FILTER (position = 0) AS first_change
    FROM maskkeep_scan AS s
    JOIN baseline AS b USING (run_id, prompt_id, position)
    GROUP BY s.run_id, s.mode, s.ranking, s.seed, s.k, s.prompt_id
)
JOIN maskkeep_cases USING (run_id, prompt_id);
