-- paper_a_table9: accuracy (%) of the test prompts with a LoRA in one layer, in the form of paper A's section 5; layer -1 is the
-- original model.
CREATE OR REPLACE VIEW paper_a_table9 AS
SELECT run_id, layer, any_value(band) AS band, any_value(learning_rate) AS learning_rate,
       100 * max(accuracy) FILTER (operation = 'all') AS accuracy,
       100 * max(low) FILTER (operation = 'all') AS low, 100 * max(high) FILTER (operation = 'all') AS high,
       100 * max(accuracy) FILTER (operation = 'add') AS accuracy_add,
       100 * max(accuracy) FILTER (operation = 'sub') AS accuracy_sub,
       100 * max(accuracy) FILTER (operation = 'mul') AS accuracy_mul,
       100 * max(accuracy) FILTER (operation = 'div') AS accuracy_div
FROM (
    SELECT run_id, layer, band, learning_rate, operation, accuracy, low, high FROM lora_sweep_curve
    UNION ALL
    SELECT DISTINCT run_id, -1 AS layer, NULL AS band, NULL AS learning_rate, operation, baseline_accuracy AS accuracy,
           NULL AS low, NULL AS high
    FROM lora_sweep_curve
)
GROUP BY run_id, layer;
