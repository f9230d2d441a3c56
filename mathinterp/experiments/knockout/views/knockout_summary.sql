-- knockout_summary: each run's knock-out in one row per operation and control (random, random_layer; null without any).
-- halved_at: the fewest heads of those measured that leave at most half of the baseline's accuracy; null where none does.
-- control_halved_at: the same for the control's mean over seeds. area_between: area between the control's mean curve and
-- the ranking's, by trapezoids over the k that both have (accuracy, a fraction, times heads); mean_gap: that area divided
-- by the largest such k, the mean accuracy by which random heads cost less. lowest_accuracy is the ranking's lowest.
CREATE OR REPLACE VIEW knockout_summary AS
SELECT e.run_id, e.operation, a.control, e.baseline_accuracy, e.lowest_accuracy, e.halved_at,
       c.halved_at AS control_halved_at, a.area_between, a.area_between / a.last_k AS mean_gap, a.last_k, model, status
FROM (SELECT * FROM knockout_halved WHERE ranking = 'effect') AS e
LEFT JOIN (
    SELECT run_id, control, operation, max(k) AS last_k,
           sum((k - previous_k) * (gap + previous_gap) / 2) AS area_between
    FROM (
        SELECT *, lag(k) OVER points AS previous_k, lag(gap) OVER points AS previous_gap
        FROM (
            SELECT r.run_id, r.ranking AS control, r.operation, r.k, r.accuracy - o.accuracy AS gap
            FROM knockout_bands AS r
            JOIN knockout_bands AS o USING (run_id, operation, k)
            WHERE o.ranking = 'effect' AND r.ranking <> 'effect'
        )
        WINDOW points AS (PARTITION BY run_id, control, operation ORDER BY k)
    )
    GROUP BY run_id, control, operation
) AS a USING (run_id, operation)
LEFT JOIN knockout_halved AS c ON c.run_id = e.run_id AND c.operation = e.operation AND c.ranking = a.control
JOIN run_states AS s ON s.run_id = e.run_id;
