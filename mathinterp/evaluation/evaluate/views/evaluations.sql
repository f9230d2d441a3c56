-- evaluations: one row per evaluated model and item (benchmarks through lm-evaluation-harness, prompt sets by greedy decoding).
-- subset: the operation, MMLU's subject, else the task. response: what the model wrote; under multiple choice the likeliest
-- letter. predicted: the number or letter read from it. logprob: of the right choice (natural log), null for generated text.
-- truncated: the context was cut on the left to fit the model. The oldest run comes first: a model asked again, after its end
-- tokens were corrected or under other options, has its items of each run.
CREATE OR REPLACE VIEW evaluations AS
SELECT e.run_id, e.task, e.subset, e.item_id, e.correct, e.response, e.predicted, e.target, e.logprob, e.truncated
FROM ${evaluations} AS e
LEFT JOIN run_records AS r USING (run_id)
ORDER BY r.started_at, e.run_id, e.subset, length(e.item_id), e.item_id;
