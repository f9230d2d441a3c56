-- paper_a_table9: accuracy (a fraction) of the test prompts with a LoRA in one layer, in the form of paper A's section 5; layer -1 is the
-- original model.
CREATE OR REPLACE VIEW paper_a_table9 AS
SELECT run_id, layer, any_value(band) AS band, any_value(learning_rate) AS learning_rate,
       max(accuracy) FILTER (operation = 'all') AS accuracy,
       max(low) FILTER (operation = 'all') AS low, max(high) FILTER (operation = 'all') AS high,
       max(accuracy) FILTER (operation = 'add') AS accuracy_add,
       max(accuracy) FILTER (operation = 'sub') AS accuracy_sub,
       max(accuracy) FILTER (operation = 'mul') AS accuracy_mul,
       max(accuracy) FILTER (operation = 'div') AS accuracy_div
FROM (
    SELECT run_id, layer, band, learning_rate, operation, accuracy, low, high FROM lora_sweep_curve
    UNION ALL
    SELECT DISTINCT run_id, -1 AS layer, NULL AS band, NULL AS learning_rate, operation, baseline_accuracy AS accuracy,
           baseline_low AS low, baseline_high AS high
    FROM lora_sweep_curve
)
GROUP BY run_id, layer;
