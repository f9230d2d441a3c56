-- ablated_prompts: per ablated component and prompt, the units that count (n), those right without the ablation
-- (baseline_hits) and with it (hits), those that the ablation made wrong (fell) and right (rose), and the summed change of
-- log-probability. The unit is a scored token, or the whole answer under exact_match. baseline_whole, whole_right: whether
-- every counted token is right. Prompts are the clusters of the
-- intervals in head_effects.
CREATE OR REPLACE VIEW ablated_prompts AS
SELECT run_id, node, layer, head, operation, digits, prompt_id,
       CASE WHEN whole THEN 1 ELSE tokens END AS n,
       CASE WHEN whole THEN (baseline_right = tokens)::INTEGER ELSE baseline_right END AS baseline_hits,
       CASE WHEN whole THEN (ablated_right = tokens)::INTEGER ELSE ablated_right END AS hits,
       CASE WHEN whole THEN (baseline_right = tokens AND ablated_right < tokens)::INTEGER ELSE fell END AS fell,
       CASE WHEN whole THEN (baseline_right < tokens AND ablated_right = tokens)::INTEGER ELSE rose END AS rose,
       (baseline_right = tokens)::INTEGER AS baseline_whole, (ablated_right = tokens)::INTEGER AS whole_right,
       logprob_change
FROM (
    SELECT a.run_id, a.node, a.layer, a.head, a.prompt_id,
           any_value(b.operation) AS operation, any_value(b.digits) AS digits,
           any_value(b.scoring) = 'exact_match' AS whole,
           count(*)::INTEGER AS tokens,
           sum(b.correct::INTEGER)::INTEGER AS baseline_right,
           sum(a.correct::INTEGER)::INTEGER AS ablated_right,
           count_if(b.correct AND NOT a.correct)::INTEGER AS fell,
           count_if(a.correct AND NOT b.correct)::INTEGER AS rose,
           sum(a.logprob::DOUBLE - b.logprob::DOUBLE) AS logprob_change
    FROM ablated_tokens AS a
    JOIN scored_baseline AS b USING (run_id, prompt_id, position)
    GROUP BY a.run_id, a.node, a.layer, a.head, a.prompt_id
);
