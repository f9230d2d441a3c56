-- method_league: every method of a league beside the exact effects of the same heads and MLPs on the same prompts. Rank correlations
-- (spearman, kendall, spearman_absolute), overlap_K of the first K and prompt_correlation as in league_scores, each with a 95 %
-- interval over prompts: value -+ student_factor(n) * sqrt(n / (n - 1)) * bootstrap standard error, within the measure's range. A learned mask has
-- no signs (spearman and the like are null, and so are their bounds) and one score for all prompts: its intervals are of the exact
-- effects alone. cpr, cmd: of the circuits that the method's scores rank (circuit_scores, all else as on the counterfactual); null
-- where none were run. seconds: from the loaded model to the last row, on whatever computed it; exact: heads and MLPs. forwards,
-- backwards: passes over each prompt; exact has one forward for each node (from its layer on) and two for each of its two runs.
CREATE OR REPLACE VIEW method_league AS
SELECT s.run_id, r.model, r.prompts, s.method, s.ranking_run, s.nodes, s.n,
       spearman, within(spearman - spearman_half, -1, 1) AS spearman_low, within(spearman + spearman_half, -1, 1) AS spearman_high,
       kendall, within(kendall - kendall_half, -1, 1) AS kendall_low, within(kendall + kendall_half, -1, 1) AS kendall_high,
       spearman_absolute, within(spearman_absolute - absolute_half, -1, 1) AS spearman_absolute_low,
       within(spearman_absolute + absolute_half, -1, 1) AS spearman_absolute_high,
       overlap_5, within(overlap_5 - half_5, 0, 1) AS overlap_5_low, within(overlap_5 + half_5, 0, 1) AS overlap_5_high,
       overlap_10, within(overlap_10 - half_10, 0, 1) AS overlap_10_low, within(overlap_10 + half_10, 0, 1) AS overlap_10_high,
       overlap_32, within(overlap_32 - half_32, 0, 1) AS overlap_32_low, within(overlap_32 + half_32, 0, 1) AS overlap_32_high,
       prompt_correlation, within(prompt_correlation - prompt_half, -1, 1) AS prompt_correlation_low,
       within(prompt_correlation + prompt_half, -1, 1) AS prompt_correlation_high,
       c.cpr, c.cpr_low, c.cpr_high, c.cmd, c.cmd_low, c.cmd_high, t.seconds, t.forwards, t.backwards, r.status
FROM (
    SELECT run_id, method, ranking_run, nodes, prompts::BIGINT AS n,
           max(value) FILTER (measure = 'spearman') AS spearman,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'spearman') AS spearman_half,
           max(value) FILTER (measure = 'kendall') AS kendall,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'kendall') AS kendall_half,
           max(value) FILTER (measure = 'spearman_absolute') AS spearman_absolute,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'spearman_absolute') AS absolute_half,
           max(value) FILTER (measure = 'overlap' AND k = 5) AS overlap_5,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'overlap' AND k = 5) AS half_5,
           max(value) FILTER (measure = 'overlap' AND k = 10) AS overlap_10,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'overlap' AND k = 10) AS half_10,
           max(value) FILTER (measure = 'overlap' AND k = 32) AS overlap_32,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'overlap' AND k = 32) AS half_32,
           max(value) FILTER (measure = 'prompt_correlation') AS prompt_correlation,
           max(student_factor(prompts) * sqrt(prompts / (prompts - 1.0)) * error) FILTER (measure = 'prompt_correlation') AS prompt_half
    FROM league_scores
    GROUP BY run_id, method, ranking_run, nodes, prompts
) AS s
JOIN runs AS r ON r.run_id = s.run_id
LEFT JOIN (
    SELECT league.run_id, league.method,
           sum(coalesce((member.notes ->> 'seconds_from_loaded_model')::DOUBLE, member.wall_seconds)) AS seconds,
           any_value(CASE league.method WHEN 'exact' THEN league.nodes + 4
                          ELSE (member.notes ->> 'forwards_per_prompt')::INTEGER END) AS forwards,
           any_value(CASE league.method WHEN 'exact' THEN 0
                          ELSE (member.notes ->> 'backwards_per_prompt')::INTEGER END) AS backwards
    FROM (
        SELECT DISTINCT s.run_id, s.method, s.nodes,
               CASE WHEN s.method = 'exact' THEN unnest([r.parameters ->> 'heads', r.parameters ->> 'mlps'])
                    ELSE s.ranking_run END AS member
        FROM league_scores AS s JOIN run_records AS r ON r.run_id = s.run_id
    ) AS league
    JOIN run_records AS member ON member.run_id = league.member
    GROUP BY league.run_id, league.method
) AS t ON t.run_id = s.run_id AND t.method = s.method
LEFT JOIN (
    SELECT circuits.*, dtype FROM circuit_scores AS circuits JOIN run_records USING (run_id)
    WHERE level = 'node' AND ablation = 'resample' AND circuits.status = 'finished'
) AS c ON c.prompts_fingerprint = r.prompts_fingerprint AND c.dtype = r.dtype
    AND c.ranking_run = CASE s.method WHEN 'exact' THEN concat(r.parameters ->> 'heads', ',', r.parameters ->> 'mlps')
                             ELSE s.ranking_run END;
