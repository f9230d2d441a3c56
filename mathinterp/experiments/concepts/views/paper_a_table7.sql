-- paper_a_table7: the number of hidden-interpretable shallow neurons at each level M = 0..3, in the form of paper A,
-- Table 7. expected_hits: concept tokens that a random order of the vocabulary would have among the first `top`.
CREATE OR REPLACE VIEW paper_a_table7 AS
SELECT l.run_id, r.model, l.level, l.kept AS neurons, l.total, l.share,
       (r.notes ->> 'expected_hits')::DOUBLE AS expected_hits
FROM concept_levels AS l
JOIN run_records AS r USING (run_id)
WHERE l.layer IS NULL AND l.level <= 3;
