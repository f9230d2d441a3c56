-- paper_a_table6: paper A's Table 6, in per cent: by how much the coefficients of the other first k neurons fall when the
-- lowest of them is zeroed, beside random neurons of the same layer. cases and operation 'all': see neuron_graph_effects.
CREATE OR REPLACE VIEW paper_a_table6 AS
SELECT run_id, operation, cases, k, max(n) AS n, 100 * max(decrease) FILTER (zeroed = 'root') AS root,
       100 * max(decrease_low) FILTER (zeroed = 'root') AS root_low,
       100 * max(decrease_high) FILTER (zeroed = 'root') AS root_high,
       100 * max(decrease) FILTER (zeroed = 'random') AS random,
       100 * max(decrease_low) FILTER (zeroed = 'random') AS random_low,
       100 * max(decrease_high) FILTER (zeroed = 'random') AS random_high
FROM neuron_graph_effects
GROUP BY run_id, operation, cases, k;
