-- latest_runs: of each kind of scan the finished run that ended last, so that a query of its effects never mixes runs, models or
-- prompts: SELECT ... FROM head_effects JOIN latest_runs USING (run_id). label: of the prompts.
-- adaptive: runs with --decide, whose rows are in views of decisions, are latest by themselves. Runs made again with the same
-- command keep the time at which they were first finished; name another run by WHERE run_id = '...' (see runs).
CREATE OR REPLACE VIEW latest_runs AS
SELECT run_id, scan, prompts AS label, dtype, finished_at,
       (parameters ->> 'decide') IS NOT NULL AS adaptive
FROM runs
WHERE status = 'finished'
QUALIFY row_number() OVER (PARTITION BY scan, adaptive ORDER BY finished_at DESC NULLS LAST, started_at DESC, run_id) = 1;
