-- maskkeep_runs: the neuron scan that a mask/keep run took its neurons from. other_side: the condition of that scan that is
-- not this run's model: 'intervened', but 'original' where the neurons are tried out in the tuned model they were found with.
CREATE OR REPLACE VIEW maskkeep_runs AS
SELECT r.run_id, r.parameters ->> 'neurons_from' AS neurons_from,
       CASE WHEN r.model_fingerprint = n.model_fingerprint THEN 'intervened' ELSE 'original' END AS other_side
FROM run_records AS r
LEFT JOIN run_records AS n ON n.run_id = (r.parameters ->> 'neurons_from')
WHERE r.scan = 'maskkeep';
