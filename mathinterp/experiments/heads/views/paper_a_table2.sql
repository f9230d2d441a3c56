-- paper_a_table2: relative decrease (a fraction) of accuracy, (original - ablated) / original, per operation and number of digits
-- of the operands, in the form of paper A, Table 2. decrease: over all operations, from their unweighted mean accuracies.
CREATE OR REPLACE VIEW paper_a_table2 AS
SELECT run_id, digits, rank, component AS head, sum(n)::BIGINT AS n,
       (avg(original) - avg(accuracy)) / nullif(avg(original), 0) AS decrease,
       max(relative) FILTER (operation = 'add') AS decrease_add,
       max(relative) FILTER (operation = 'sub') AS decrease_sub,
       max(relative) FILTER (operation = 'mul') AS decrease_mul,
       max(relative) FILTER (operation = 'div') AS decrease_div, any_value(model) AS model, any_value(status) AS status
FROM (
    SELECT run_id, digits, rank, component, operation, sum(n) AS n,
           sum(baseline_hits) / sum(n) AS original,
           sum(hits) / sum(n) AS accuracy,
           (sum(baseline_hits) - sum(hits)) / nullif(sum(baseline_hits), 0) AS relative
    FROM ablated_prompts
    JOIN head_ranks USING (run_id, layer, head)
    WHERE node = 'head'
    GROUP BY run_id, digits, rank, component, operation
)
JOIN run_states USING (run_id)
GROUP BY run_id, digits, rank, component;
