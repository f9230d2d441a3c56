-- head_rankings: the heads of every run that ranks heads, per operation, on one scale: the larger the score, the more the head
-- matters. method: zero, mean or resample ablation (score: drop of accuracy, a fraction; "..., log-probability": loss of
-- log-probability per unit, nats); path patching (score: -mean effect under the run's measure; "..., log-probability", unless
-- that is the measure: nats lost), named with its receiver if it has one; first-order attribution (of the path scan's run:
-- estimated loss of the raw logit); iterative masking (operation 'all'; score: -step; null for a head that was never masked:
-- those it does not rank). tie_break orders heads of one score: an ablation's loss of log-probability.
CREATE OR REPLACE VIEW head_rankings AS
SELECT e.run_id, (r.parameters ->> 'ablation') || ' ablation' || s.suffix AS method, e.operation, e.layer, e.head,
       CASE WHEN s.suffix = '' THEN round(e.drop, 12) ELSE -e.logprob_change END AS score,
       -e.logprob_change AS tie_break
FROM ablation_effects AS e
JOIN run_records AS r USING (run_id)
CROSS JOIN (SELECT unnest(['', ', log-probability']) AS suffix) AS s
WHERE e.node = 'head'
UNION ALL
SELECT e.run_id, 'path patching' || coalesce(' to ' || (r.parameters ->> 'receiver'), '') || s.suffix AS method,
       e.operation, e.layer, e.head,
       CASE WHEN s.suffix = '' THEN -e.mean ELSE -e.logprob_change END AS score,
       NULL::DOUBLE AS tie_break
FROM path_effects AS e
JOIN run_records AS r USING (run_id)
CROSS JOIN (SELECT unnest(['', ', log-probability']) AS suffix) AS s
WHERE e.node = 'head' AND (s.suffix = '' OR (r.parameters ->> 'effect') IS DISTINCT FROM 'logprob')
UNION ALL
SELECT run_id, 'first-order attribution' AS method, operation, layer, head, -first_order AS score, NULL::DOUBLE AS tie_break
FROM attribution_effects
WHERE node = 'head'
UNION ALL
SELECT run_id, 'iterative masking' AS method, 'all' AS operation, layer, head,
       -min(step) FILTER (masked)::DOUBLE AS score, NULL::DOUBLE AS tie_break
FROM iterative_scan
GROUP BY run_id, layer, head;
