-- neuron_graph_operations: neuron_graph_effects by operation, before the mean over operations. The variance is that of a
-- ratio of sums over prompts. Case correct: right in the model that the graph was made on.
CREATE OR REPLACE VIEW neuron_graph_operations AS
SELECT run_id, operation, cases, zeroed, k, any_value(graphs_of) AS graphs_of, count(*) AS n, any_value(ratio) AS decrease,
       sum(later_lost) / nullif(sum(later_total), 0) AS later_decrease,
       ratio_variance(lost, total) AS variance
FROM (
    SELECT *, sum(lost) OVER whole / nullif(sum(total) OVER whole, 0) AS ratio
    FROM (
        SELECT prompts.*, unnest(CASE WHEN targets.correct THEN ['all', 'correct'] ELSE ['all'] END) AS cases
        FROM (
            SELECT checked.run_id, graph, operation, prompt_id, zeroed, k,
                   any_value(made.parameters ->> 'neurons_from') AS neurons_from, any_value(made.parameters ->> 'by') AS graphs_of,
                   any_value(CASE WHEN made.model_fingerprint = source.model_fingerprint THEN 'original' ELSE 'intervened' END) AS side,
                   sum((coefficient::DOUBLE - coefficient_zeroed) * sign(coefficient)) AS lost,
                   sum(abs(coefficient::DOUBLE)) AS total,
                   sum((coefficient::DOUBLE - coefficient_zeroed) * sign(coefficient)) FILTER (layer > zeroed_layer) AS later_lost,
                   sum(abs(coefficient::DOUBLE)) FILTER (layer > zeroed_layer) AS later_total
            FROM ${neuron_graph_check} AS checked
            JOIN run_records AS made ON made.run_id = checked.run_id
            LEFT JOIN run_records AS source ON source.run_id = (made.parameters ->> 'neurons_from')
            GROUP BY checked.run_id, graph, operation, prompt_id, zeroed, k
        ) AS prompts
        LEFT JOIN ${neuron_targets} AS targets
            ON targets.run_id = neurons_from AND targets.prompt_id = prompts.prompt_id AND condition = side
    )
    WINDOW whole AS (PARTITION BY run_id, operation, cases, zeroed, k)
)
GROUP BY run_id, operation, cases, zeroed, k;
