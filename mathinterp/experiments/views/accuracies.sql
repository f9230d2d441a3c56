-- accuracies: how often the unedited model is right, per run and operation and over 'all' (unweighted mean of the operations):
-- per scored token (accuracy, of n tokens) and per prompt (prompt_accuracy, of so many prompts: every counted token is right).
-- Which tokens count is the run's scoring; operation is 'none' for prompts that name none.
CREATE OR REPLACE VIEW accuracies AS
SELECT run_id, model, status, operation, n, accuracy, prompts, prompt_accuracy
FROM (
    SELECT run_id, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           sum(n)::BIGINT AS n, avg(hits / n) AS accuracy, sum(prompts)::BIGINT AS prompts, avg(whole / prompts) AS prompt_accuracy
    FROM (
        SELECT run_id, operation, sum(n)::BIGINT AS n, sum(hits)::BIGINT AS hits, count(*) AS prompts,
               count_if(hits = n)::BIGINT AS whole
        FROM (
            SELECT run_id, prompt_id, any_value(operation) AS operation, count(*) AS n, count_if(correct) AS hits
            FROM scored_baseline
            GROUP BY run_id, prompt_id
        )
        GROUP BY run_id, operation
    )
    GROUP BY GROUPING SETS ((run_id, operation), (run_id))
)
JOIN run_states USING (run_id);
