-- patching_prompts: per site, layer, direction, kept pair, kind of token and measure ('logit' or 'logprob'), the mean over the
-- pair's tokens of that kind. token_type: as in patching_scan, but 'end' for the last token, whatever it is. change: patched
-- minus unpatched score of the sentence that runs. gap: score of the sentence that is patched in, unpatched, minus that of the
-- one that runs: what a patch of everything would change.
CREATE OR REPLACE VIEW patching_prompts AS
WITH pairs AS (
    SELECT run_id, prompt_id, 'logit' AS measure, logit_original::DOUBLE AS original,
           logit_counterfactual::DOUBLE AS counterfactual FROM patching_pairs
    UNION ALL
    SELECT run_id, prompt_id, 'logprob', logprob_original::DOUBLE, logprob_counterfactual::DOUBLE FROM patching_pairs
)
SELECT s.run_id, s.site, s.layer, s.direction, CASE WHEN s.at_end THEN 'end' ELSE s.token_type END AS token_type,
       coalesce(p.operation, 'none') AS operation, s.prompt_id, pairs.measure, count(*) AS tokens,
       avg(CASE pairs.measure WHEN 'logit' THEN s.logit ELSE s.logprob END::DOUBLE)
           - any_value(CASE s.direction WHEN 'denoising' THEN pairs.counterfactual ELSE pairs.original END) AS change,
       any_value(CASE s.direction WHEN 'denoising' THEN pairs.original - pairs.counterfactual
                     ELSE pairs.counterfactual - pairs.original END) AS gap
FROM patching_scan AS s
JOIN pairs USING (run_id, prompt_id)
JOIN run_records AS r USING (run_id)
JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
GROUP BY ALL;
