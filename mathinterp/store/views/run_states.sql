-- run_states: the columns that views of effects carry of their run: its model's name and its status (see runs). Effects, ranks
-- and q-values of a run that is not 'finished' are of what is there by chance.
CREATE OR REPLACE VIEW run_states AS
SELECT run_id, model, status
FROM runs;
