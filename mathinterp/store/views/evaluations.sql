-- evaluations: one row per evaluated model and item (benchmarks through lm-evaluation-harness, prompt sets by greedy decoding).
-- subset: the operation, MMLU's subject, else the task. response: what the model wrote; under multiple choice the likeliest
-- letter. predicted: the number or letter read from it. logprob: of the right choice (natural log), null for generated text.
-- truncated: the context was cut on the left to fit the model.
CREATE OR REPLACE VIEW evaluations AS
SELECT run_id, task, subset, item_id, correct, response, predicted, target, logprob, truncated
FROM ${evaluations};
