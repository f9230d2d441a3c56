-- neuron_graph_effects: by how much the coefficients of a graph's other first k neurons fall when its root (or a random neuron
-- of that layer; all seeds together) is zeroed: decrease = sum (c - c_zeroed) sign(c) / sum |c| over neurons and prompts
-- (paper A, Table 6), with a 95 % interval (Student's t) clustered by prompt; later_decrease counts neurons of later layers alone,
-- as others cannot change. cases: 'all' prompts, or those that the neuron scan's model answered 'correct' (first token).
-- Operation 'all' is the unweighted mean over operations for graphs of prompts, else the graph of all prompts.
CREATE OR REPLACE VIEW neuron_graph_effects AS
SELECT run_id, operation, cases, zeroed, k, n, decrease, decrease - factor * sqrt(variance) AS decrease_low,
       decrease + factor * sqrt(variance) AS decrease_high, later_decrease
FROM (
    SELECT run_id, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, cases, zeroed, k,
           sum(n)::BIGINT AS n, student_factor(min(n)) AS factor, avg(decrease) AS decrease, avg(later_decrease) AS later_decrease,
           CASE WHEN count(variance) = count(*) THEN sum(variance) / count(*) ** 2 END AS variance,
           grouping(operation) AS over_operations, any_value(graphs_of) AS graphs_of
    FROM neuron_graph_operations
    GROUP BY GROUPING SETS ((run_id, operation, cases, zeroed, k), (run_id, cases, zeroed, k))
)
WHERE over_operations = 0 OR graphs_of = 'prompt';
