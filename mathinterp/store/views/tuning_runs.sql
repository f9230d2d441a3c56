-- tuning_runs: the course of every fine-tuning, one row each time it was looked at. loss: nats an answer token, mean since
-- the row before; samples and tokens a second: all workers together, since the row before, without the time that writing
-- checkpoints took; memory: bytes, the most so far of worker 0. What was trained on what: view runs (parameters, notes).
CREATE OR REPLACE VIEW tuning_runs AS
SELECT run_id, step, loss, lr, samples_per_second, tokens_per_second, memory, trained_parameters
FROM ${tuning_runs};
