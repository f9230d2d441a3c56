-- evaluation_results: each evaluation run's score and, against its base model's run over the same items in the same dtype, the
-- paired difference (fractions; gained, lost, 95 % interval, p of a score test over paired items: see evaluation_pairs). Null for a
-- base itself and where the base was not evaluated. newest: no later run of the same model, dtype, task and setting (as other data
-- files would give). q_value: Benjamini-Hochberg over the tasks of one model, dtype and setting, newest runs apart from others.
CREATE OR REPLACE VIEW evaluation_results AS
SELECT model, method, setting, dtype, task, n, accuracy, low, high, paired, base_accuracy, difference, difference_low,
       difference_high, gained, lost, p_value,
       CASE WHEN p_value IS NOT NULL THEN min(p_value * tests / rank)
           OVER (PARTITION BY model_fingerprint, setting, dtype, newest ORDER BY p_value DESC) END AS q_value,
       newest, truncated, unread, run_id, base_run_id, model_fingerprint, base_fingerprint, started_at
FROM (
    SELECT *, count(p_value) OVER (PARTITION BY model_fingerprint, setting, dtype, newest) AS tests,
           count(p_value) OVER (PARTITION BY model_fingerprint, setting, dtype, newest ORDER BY p_value) AS rank
    FROM (
        SELECT r.*, s.n, s.accuracy, s.low, s.high, s.truncated, s.unread, p.base_run_id, p.n AS paired,
               p.accuracy AS base_accuracy, p.difference, p.low AS difference_low, p.high AS difference_high, p.gained, p.lost,
               p.p_value,
               r.started_at = max(r.started_at) OVER (PARTITION BY r.model_fingerprint, r.dtype, r.setting, r.task) AS newest
        FROM evaluation_runs AS r
        JOIN evaluation_scores AS s ON s.run_id = r.run_id AND s.subset = 'all'
        LEFT JOIN (
            SELECT e.*, e.run_id AS base_run_id, b.model_fingerprint AS base_model, b.dtype AS base_dtype, b.started_at AS base_at
            FROM evaluation_pairs AS e
            JOIN evaluation_runs AS b USING (run_id)
        ) AS p ON p.other_run_id = r.run_id AND p.base_model = r.base_fingerprint AND p.base_dtype = r.dtype
            AND r.model_fingerprint <> r.base_fingerprint
        QUALIFY row_number() OVER (PARTITION BY r.run_id ORDER BY p.base_at DESC) = 1
    )
);
