-- paper_a_table6: paper A's Table 6, as fractions: by how much the coefficients of the other first k neurons fall when the
-- lowest of them is zeroed, beside random neurons of the same layer. cases and operation 'all': see neuron_graph_effects.
CREATE OR REPLACE VIEW paper_a_table6 AS
SELECT run_id, operation, cases, k, max(n) AS n, max(decrease) FILTER (zeroed = 'root') AS root,
       max(decrease_low) FILTER (zeroed = 'root') AS root_low,
       max(decrease_high) FILTER (zeroed = 'root') AS root_high,
       max(decrease) FILTER (zeroed = 'random') AS random,
       max(decrease_low) FILTER (zeroed = 'random') AS random_low,
       max(decrease_high) FILTER (zeroed = 'random') AS random_high
FROM neuron_graph_effects
GROUP BY run_id, operation, cases, k;
