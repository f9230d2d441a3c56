-- run_records: the runs' JSON records as they are on disk; read the view runs instead.
CREATE OR REPLACE VIEW run_records AS
SELECT *, coalesce(parameters ->> 'scoring', 'token') AS scoring FROM ${run_records};
