-- circuit_curves: faithfulness of circuits by their share of nodes: (metric - nothing) / (whole - nothing), all means over n prompts
-- of the logit difference: under the circuit (metric), of the whole model, and with nothing in the circuit and the input replaced.
-- low, high: 95 % interval over prompts of that ratio of means (Fieller's, with Student's t); null where whole and nothing do not
-- differ surely, as then the ratio may be anything. ordering: nodes by signed or by absolute score.
CREATE OR REPLACE VIEW circuit_curves AS
SELECT run_id, ranking_run, method, level, ablation, ordering, fraction, nodes, n, metric, whole, nothing,
       part / nullif(span, 0) AS faithfulness,
       ratio_bound(part, span, part_variance, both_variance, span_variance, student_factor(n), -1) AS low,
       ratio_bound(part, span, part_variance, both_variance, span_variance, student_factor(n), 1) AS high,
       model, status
FROM (
    SELECT c.run_id, c.ranking_run, c.method, c.level, c.ablation, c.ordering, c.fraction, c.nodes, count(*) AS n,
           avg(c.metric::DOUBLE) AS metric, avg(e.whole) AS whole, avg(e.nothing) AS nothing,
           avg(c.metric - e.nothing) AS part, avg(e.span) AS span, var_samp(c.metric - e.nothing) / count(*) AS part_variance,
           covar_samp(c.metric - e.nothing, e.span) / count(*) AS both_variance, var_samp(e.span) / count(*) AS span_variance
    FROM circuit_metric AS c
    JOIN circuit_ends AS e USING (run_id, prompt_id)
    WHERE c.ordering IN ('signed', 'absolute')
    GROUP BY c.run_id, c.ranking_run, c.method, c.level, c.ablation, c.ordering, c.fraction, c.nodes
)
JOIN run_states USING (run_id);
