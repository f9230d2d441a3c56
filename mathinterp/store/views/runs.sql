-- runs: one row per run. shards_done counts the result files that are there now.
-- status: finished; failed (the driver gave up some shards, see errors); unfinished (running, or stopped before its end).
-- code_version: with the commit, or a digest of the source files; versions: of all that made shards of the run, packages and
-- device, one entry each (null for runs of versions that did not record them). Times are UTC. wall_seconds adds up over the sessions that worked on the run.
CREATE OR REPLACE VIEW runs AS
SELECT r.run_id, scan, model, model_fingerprint, prompts, prompts_fingerprint, dtype, parameters, code_version,
       started_at, finished_at, len(shards) AS shards, coalesce(done.shards_done, 0) AS shards_done,
       CASE WHEN coalesce(done.shards_done, 0) = len(shards) THEN 'finished'
            WHEN json_array_length(json_keys(errors)) > 0 THEN 'failed'
            ELSE 'unfinished' END AS status,
       errors, attempts, hosts, wall_seconds, notes, versions
FROM run_records AS r
LEFT JOIN (
    SELECT asked.run_id, count(DISTINCT asked.shard) AS shards_done
    FROM (SELECT run_id, unnest(shards) AS shard FROM run_records) AS asked
    JOIN ${shard_files} AS there USING (run_id, shard)
    GROUP BY asked.run_id
) AS done USING (run_id);
