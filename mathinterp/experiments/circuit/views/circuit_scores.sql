-- circuit_scores: MIB's CPR and CMD of a ranking: the areas under faithfulness f (nodes ranked by signed score; the larger the better)
-- and under |1 - f| (by absolute score; the smaller the better) over the fractions of nodes from .001 to 1, by trapezoids; view
-- circuit_curves has f. Each with a 95 % interval over n prompts as there. scored: the nodes that fractions are of.
CREATE OR REPLACE VIEW circuit_scores AS
SELECT run_id, ranking_run, method, s.level, ablation, scored, n, whole, nothing,
       cpr, cpr_low, cpr_high, cmd, within(cmd_low, 0, 'inf'::DOUBLE) AS cmd_low, cmd_high, prompts_fingerprint, s.model, s.status
FROM (
    SELECT run_id, ranking_run, method, level, ablation, max(scored) AS scored, max(n) AS n, max(whole) AS whole,
           max(nothing) AS nothing, max(area) FILTER (ordering = 'signed') AS cpr,
           max(low) FILTER (ordering = 'signed') AS cpr_low, max(high) FILTER (ordering = 'signed') AS cpr_high,
           max(area) FILTER (ordering = 'absolute') AS cmd, max(low) FILTER (ordering = 'absolute') AS cmd_low,
           max(high) FILTER (ordering = 'absolute') AS cmd_high, any_value(model) AS model, any_value(status) AS status
    FROM (
        SELECT *, part / nullif(span, 0) AS area,
               ratio_bound(part, span, part_variance, both_variance, span_variance, student_factor(n), -1) AS low,
               ratio_bound(part, span, part_variance, both_variance, span_variance, student_factor(n), 1) AS high
        FROM (
            SELECT run_id, ranking_run, method, level, ablation, ordering, max(scored) AS scored, count(*) AS n,
                   avg(whole) AS whole, avg(nothing) AS nothing, avg(area) AS part, avg(span) AS span,
                   var_samp(area) / count(*) AS part_variance, covar_samp(area, span) / count(*) AS both_variance,
                   var_samp(span) / count(*) AS span_variance
            FROM circuit_areas
            GROUP BY run_id, ranking_run, method, level, ablation, ordering
        )
        JOIN run_states USING (run_id)
    )
    GROUP BY run_id, ranking_run, method, level, ablation
) AS s
JOIN run_records USING (run_id);
