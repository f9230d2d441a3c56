-- paper_a_table11: accuracy (a fraction) of the original model, of LoRA, and of LoRA trained on the pruned models, in the form of paper
-- A's section 6.1; also of the pruned models as they are. Random draws have a row each (seed). kept: neurons left in the
-- pruned layers; kept_share: of all that those layers have, a fraction.
CREATE OR REPLACE VIEW paper_a_table11 AS
SELECT a.run_id, a.condition, a.seed, a.accuracy AS accuracy, a.low AS low, a.high AS high,
       a.accuracy_add AS accuracy_add, a.accuracy_sub AS accuracy_sub, a.accuracy_mul AS accuracy_mul,
       a.accuracy_div AS accuracy_div, k.kept, k.kept::DOUBLE / (r.notes ->> 'pruned_from')::INTEGER AS kept_share
FROM (
    SELECT run_id, condition, seed,
           max(accuracy) FILTER (operation = 'all') AS accuracy, max(low) FILTER (operation = 'all') AS low,
           max(high) FILTER (operation = 'all') AS high,
           max(accuracy) FILTER (operation = 'add') AS accuracy_add, max(accuracy) FILTER (operation = 'sub') AS accuracy_sub,
           max(accuracy) FILTER (operation = 'mul') AS accuracy_mul, max(accuracy) FILTER (operation = 'div') AS accuracy_div
    FROM (
        SELECT run_id, condition, seed, operation, accuracy, low, high FROM tuned_accuracy WHERE layer IS NULL
        UNION ALL
        SELECT DISTINCT run_id, 'origin' AS condition, 0::SMALLINT AS seed, operation, baseline_accuracy, baseline_low,
               baseline_high
        FROM tuned_accuracy WHERE layer IS NULL
    )
    GROUP BY run_id, condition, seed
) AS a
JOIN run_records AS r ON r.run_id = a.run_id
LEFT JOIN (SELECT run_id, condition, seed, count(*) AS kept FROM prune_neurons GROUP BY run_id, condition, seed) AS k
    ON k.run_id = a.run_id AND k.seed = a.seed AND k.condition = split_part(a.condition, '_', 1);
