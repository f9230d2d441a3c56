-- run_records: the runs' JSON records as they are on disk; read the view runs instead. adaptive: the run decides (--decide), and
-- stops each node when that is sure.
CREATE OR REPLACE VIEW run_records AS
SELECT *, coalesce(parameters ->> 'scoring', 'token') AS scoring, (parameters ->> 'decide') IS NOT NULL AS adaptive
FROM ${run_records};
