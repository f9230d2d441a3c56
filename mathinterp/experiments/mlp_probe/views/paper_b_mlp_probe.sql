-- paper_b_mlp_probe: the probing curves of paper B, section 4.2, one row per operation and layer: mean cosines of MLP input,
-- output and their difference with the first digit of operand A (a), operand B (b) and the answer (c). leader: the target
-- that the MLP's output is closest to. settled: it is the answer, in this layer and in every later one.
CREATE OR REPLACE VIEW paper_b_mlp_probe AS
SELECT *, coalesce(min((leader = 'c')::INTEGER) OVER (PARTITION BY run_id, operation ORDER BY layer DESC) = 1, false) AS settled
FROM (
    SELECT run_id, operation, layer,
           max(mlp_in) FILTER (target = 'a') AS in_a, max(mlp_in) FILTER (target = 'b') AS in_b,
           max(mlp_in) FILTER (target = 'c') AS in_c,
           max(mlp_out) FILTER (target = 'a') AS out_a, max(mlp_out) FILTER (target = 'b') AS out_b,
           max(mlp_out) FILTER (target = 'c') AS out_c,
           max(difference) FILTER (target = 'a') AS difference_a, max(difference) FILTER (target = 'b') AS difference_b,
           max(difference) FILTER (target = 'c') AS difference_c,
           first(target ORDER BY mlp_out DESC, target) AS leader,
           any_value(model) AS model, any_value(status) AS status
    FROM mlp_probe_curve
    GROUP BY run_id, operation, layer
);
