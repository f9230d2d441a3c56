-- paper_a_table13: the neurons that a gender edit zeroed, with what each added to the stereotypes (nats; see gender_neurons),
-- in the order of their rank. run_id is the edit's; the neurons were found by the scan of the same model's genders.
CREATE OR REPLACE VIEW paper_a_table13 AS
SELECT e.run_id, e.rank, e.layer, e.neuron, g.change, g.change_woman, g.change_man, g.run_id AS found_by
FROM edit_neurons AS e
JOIN run_records AS r ON r.run_id = e.run_id
JOIN run_records AS f ON f.scan = 'gender_neurons' AND f.model_fingerprint = r.model_fingerprint AND f.dtype = r.dtype
JOIN gender_neurons AS g ON g.run_id = f.run_id AND g.layer = e.layer AND g.neuron = e.neuron
WHERE e.edit = 'edited';
