-- neuron_runs: what the views of neuron scans need of a run. change_sign: 1 where change is intervened - original.
CREATE OR REPLACE VIEW neuron_runs AS
SELECT run_id, parameters ->> 'against' AS against, parameters ->> 'rank' AS ranking, (parameters ->> 'top')::INTEGER AS top,
       parameters ->> 'keep' = 'all' AS keeps_all,
       CASE WHEN parameters ->> 'change' = 'intervened - original' THEN 1::FLOAT ELSE -1::FLOAT END AS change_sign
FROM run_records
WHERE scan = 'neurons';
