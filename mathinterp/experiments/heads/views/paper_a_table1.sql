-- paper_a_table1: accuracy (a fraction) per operation under each head's ablation, in the form of paper A, Table 1: rank 0 is the
-- original model, then the heads that cost most. The drop columns are fractions too. Say WHERE rank <= 5 for the top five.
CREATE OR REPLACE VIEW paper_a_table1 AS
SELECT run_id,
       row_number() OVER (PARTITION BY run_id ORDER BY original DESC, round(drop_all, 12) DESC, layer, head) - 1 AS rank,
       CASE WHEN original THEN 'original' ELSE layer || '.' || head END AS head,
       CASE WHEN original THEN original_all ELSE accuracy_all END AS accuracy,
       CASE WHEN original THEN original_add ELSE accuracy_add END AS accuracy_add,
       CASE WHEN original THEN original_sub ELSE accuracy_sub END AS accuracy_sub,
       CASE WHEN original THEN original_mul ELSE accuracy_mul END AS accuracy_mul,
       CASE WHEN original THEN original_div ELSE accuracy_div END AS accuracy_div,
       CASE WHEN original THEN 0 ELSE drop_all END AS drop,
       CASE WHEN original THEN 0 ELSE drop_add END AS drop_add,
       CASE WHEN original THEN 0 ELSE drop_sub END AS drop_sub,
       CASE WHEN original THEN 0 ELSE drop_mul END AS drop_mul,
       CASE WHEN original THEN 0 ELSE drop_div END AS drop_div, model, status
FROM (
    SELECT run_id, layer, head, any_value(model) AS model, any_value(status) AS status, grouping(layer) = 1 AS original,
           max(baseline_accuracy) FILTER (operation = 'all') AS original_all,
           max(baseline_accuracy) FILTER (operation = 'add') AS original_add,
           max(baseline_accuracy) FILTER (operation = 'sub') AS original_sub,
           max(baseline_accuracy) FILTER (operation = 'mul') AS original_mul,
           max(baseline_accuracy) FILTER (operation = 'div') AS original_div,
           max(accuracy) FILTER (operation = 'all') AS accuracy_all,
           max(accuracy) FILTER (operation = 'add') AS accuracy_add,
           max(accuracy) FILTER (operation = 'sub') AS accuracy_sub,
           max(accuracy) FILTER (operation = 'mul') AS accuracy_mul,
           max(accuracy) FILTER (operation = 'div') AS accuracy_div,
           max(drop) FILTER (operation = 'all') AS drop_all,
           max(drop) FILTER (operation = 'add') AS drop_add,
           max(drop) FILTER (operation = 'sub') AS drop_sub,
           max(drop) FILTER (operation = 'mul') AS drop_mul,
           max(drop) FILTER (operation = 'div') AS drop_div
    FROM head_effects
    GROUP BY GROUPING SETS ((run_id, layer, head), (run_id))
);
