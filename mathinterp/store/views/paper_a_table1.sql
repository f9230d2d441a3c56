-- paper_a_table1: accuracy (%) per operation under each head's ablation, in the form of paper A, Table 1: rank 0 is the
-- original model, then the heads that cost most. The drop columns are percentage points. Say WHERE rank <= 5 for the top five.
CREATE OR REPLACE VIEW paper_a_table1 AS
SELECT run_id, rank, component AS head,
       100 * max(accuracy) FILTER (operation = 'all') AS accuracy,
       100 * max(accuracy) FILTER (operation = 'add') AS accuracy_add,
       100 * max(accuracy) FILTER (operation = 'sub') AS accuracy_sub,
       100 * max(accuracy) FILTER (operation = 'mul') AS accuracy_mul,
       100 * max(accuracy) FILTER (operation = 'div') AS accuracy_div,
       100 * max(drop) FILTER (operation = 'all') AS drop,
       100 * max(drop) FILTER (operation = 'add') AS drop_add,
       100 * max(drop) FILTER (operation = 'sub') AS drop_sub,
       100 * max(drop) FILTER (operation = 'mul') AS drop_mul,
       100 * max(drop) FILTER (operation = 'div') AS drop_div
FROM (
    SELECT e.run_id, r.rank, r.component, e.operation, e.accuracy, e.drop
    FROM head_effects AS e
    JOIN head_ranks AS r USING (run_id, layer, head)
    UNION ALL
    SELECT run_id, 0 AS rank, 'original' AS component, operation, any_value(baseline_accuracy) AS accuracy, 0 AS drop
    FROM head_effects
    GROUP BY run_id, operation
)
GROUP BY run_id, rank, component;
