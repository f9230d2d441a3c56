-- stability_runs: the computations of stability, one per scan (run_id), number of draws and seed. computation: their own id, in
-- stability_nodes and stability_overlaps. shown: the one that the views stability and stability_overlap show of a scan: of those
-- with the most draws the last one made.
CREATE OR REPLACE VIEW stability_runs AS
SELECT parameters ->> 'of' AS run_id, run_id AS computation, (parameters ->> 'draws')::INTEGER AS draws,
       (parameters ->> 'seed')::BIGINT AS seed,
       row_number() OVER (PARTITION BY parameters ->> 'of'
           ORDER BY (parameters ->> 'draws')::INTEGER DESC, started_at DESC, run_id) = 1 AS shown
FROM runs
WHERE scan = 'stability' AND status = 'finished';
