-- tuned_prompts: per tuned model and prompt the scored tokens (n), those that are right (hits) and those that the original
-- model had right (baseline_hits), and those gained and lost. A tuned model is a trial of a layer sweep (layer, learning_rate) or a condition of a
-- pruning experiment (condition, seed).
CREATE OR REPLACE VIEW tuned_prompts AS
SELECT t.run_id, t.condition, t.seed, t.layer, t.learning_rate, b.operation, t.prompt_id, count(*) AS n,
       sum(t.correct::INTEGER) AS hits, sum(b.correct::INTEGER) AS baseline_hits,
       count_if(t.correct AND NOT b.correct)::INTEGER AS gained, count_if(b.correct AND NOT t.correct)::INTEGER AS lost
FROM (
    SELECT run_id, 'lora' AS condition, 0::SMALLINT AS seed, layer, learning_rate, prompt_id, position, correct FROM sweep_scan
    UNION ALL
    SELECT run_id, condition, seed, NULL AS layer, NULL AS learning_rate, prompt_id, position, correct FROM prune_scan
) AS t
JOIN scored_baseline AS b USING (run_id, prompt_id, position)
GROUP BY ALL;
