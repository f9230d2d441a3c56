-- circuit_ends: per prompt the logit difference of the whole model, that with nothing in the circuit, and span, whole - nothing.
CREATE OR REPLACE VIEW circuit_ends AS
SELECT run_id, prompt_id, whole, nothing, whole - nothing AS span
FROM (
    SELECT run_id, prompt_id, max(metric::DOUBLE) FILTER (ordering = 'full') AS whole,
           max(metric::DOUBLE) FILTER (ordering = 'empty') AS nothing
    FROM circuit_metric
    WHERE ordering IN ('empty', 'full')
    GROUP BY run_id, prompt_id
);
