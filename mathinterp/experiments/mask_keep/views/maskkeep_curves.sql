-- maskkeep_curves: maskkeep_prompts (lost = baseline_hits - hits), and with seed null the random neurons' mean over draws and
-- what the prompt's own neurons cost beyond that mean (ranking excess).
CREATE OR REPLACE VIEW maskkeep_curves AS
SELECT run_id, cases, scoring, mode, ranking, seed, k, operation, prompt_id, n, baseline_hits,
       (baseline_hits - hits)::DOUBLE AS lost, logprob_change
FROM maskkeep_prompts
UNION ALL
SELECT run_id, cases, scoring, mode, unnest(['random', 'excess']) AS ranking, NULL AS seed, k, operation, prompt_id, n,
       baseline_hits, unnest([random_lost, top_lost - random_lost]) AS lost,
       unnest([random_change, top_change - random_change]) AS logprob_change
FROM (
    SELECT run_id, cases, scoring, mode, k, operation, prompt_id, n, baseline_hits,
           sum(baseline_hits - hits) FILTER (ranking = 'top')::DOUBLE AS top_lost,
           avg(baseline_hits - hits) FILTER (ranking = 'random') AS random_lost,
           sum(logprob_change) FILTER (ranking = 'top') AS top_change,
           avg(logprob_change) FILTER (ranking = 'random') AS random_change
    FROM maskkeep_prompts
    GROUP BY ALL
)
WHERE random_lost IS NOT NULL AND top_lost IS NOT NULL;
