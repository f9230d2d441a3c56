-- knockout_halved: where each knock-out curve (the mean over seeds) has halved: the fewest heads of those measured that
-- leave at most half of the baseline's accuracy. Null where none does, or where the baseline is never right.
CREATE OR REPLACE VIEW knockout_halved AS
SELECT run_id, ranking, operation, baseline_accuracy, min(accuracy) AS lowest_accuracy,
       min(k) FILTER (baseline_accuracy > 0 AND accuracy <= baseline_accuracy / 2) AS halved_at
FROM (
    SELECT *, max(accuracy) FILTER (k = 0) OVER (PARTITION BY run_id, ranking, operation) AS baseline_accuracy
    FROM knockout_bands
)
GROUP BY run_id, ranking, operation, baseline_accuracy;
