-- operand_faithfulness: accuracy of the first answer token with k neurons of each deep layer kept at END and the others ablated,
-- beside the whole model's (baseline_accuracy); drop with its 95 % interval (score interval, docs/statistics.md). ranking: top
-- (largest effect) or random; k = 0: none kept. faithfulness: (mean log-probability - that of k = 0) / (whole model's - that of
-- k = 0): 1 is the whole model, 0 is none kept; null where these two differ by 0.05 nats or less,
-- or the whole model is below.
CREATE OR REPLACE VIEW operand_faithfulness AS
SELECT run_id, r.parameters ->> 'ablation' AS ablation, ranking, k, n, accuracy, baseline_accuracy, drop,
       score_bound(drop, [part], -1) AS drop_low, score_bound(drop, [part], 1) AS drop_high,
       logprob, baseline_logprob,
       CASE WHEN baseline_logprob - floor > 0.05 THEN (logprob - floor) / (baseline_logprob - floor) END AS faithfulness, r.model, s.status
FROM (
    SELECT *, max(logprob) FILTER (k = 0) OVER (PARTITION BY run_id) AS floor
    FROM (
        SELECT run_id, s.ranking, s.k, count(*) AS n, avg(s.correct::INTEGER) AS accuracy,
               avg(b.correct::INTEGER) AS baseline_accuracy,
               avg(b.correct::INTEGER) - avg(s.correct::INTEGER) AS drop,
               score_part((b.correct AND NOT s.correct)::INTEGER, (s.correct AND NOT b.correct)::INTEGER, 1) AS part,
               avg(s.logprob::DOUBLE) AS logprob, avg(b.logprob::DOUBLE) AS baseline_logprob
        FROM operand_keep_scan AS s
        JOIN baseline AS b USING (run_id, prompt_id, position)
        GROUP BY run_id, s.ranking, s.k
    )
)
JOIN run_records AS r USING (run_id)
JOIN run_states AS s USING (run_id);
