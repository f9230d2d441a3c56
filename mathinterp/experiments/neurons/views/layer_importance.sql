-- layer_importance: per layer and operation the mean log-probability increase (nats) of blocks and of their parts. ffn: the
-- MLP's whole output added to the stream before it; neurons_sum: its neurons' importances added up; attention: the whole
-- output added to the layer's input; heads_sum. A block's increase is not the sum of its parts': how far they are apart is
-- what this shows.
CREATE OR REPLACE VIEW layer_importance AS
SELECT run_id, layer, operation, condition, n, ffn, neurons_sum, attention, heads_sum
FROM (
    SELECT run_id, layer, operation, condition, count(DISTINCT prompt_id) AS n,
           avg(importance) FILTER (node = 'ffn') AS ffn,
           avg(importance) FILTER (node = 'neurons') AS neurons_sum,
           avg(importance) FILTER (node = 'attention') AS attention,
           sum(importance) FILTER (node = 'head') / count(DISTINCT prompt_id) AS heads_sum
    FROM (
        SELECT run_id, layer, operation, prompt_id, node, 'original' AS condition, importance FROM ${neuron_scan}
        WHERE node <> 'neuron'
        UNION ALL
        SELECT run_id, layer, operation, prompt_id, node, 'intervened', intervened_importance FROM ${neuron_scan}
        WHERE node <> 'neuron' AND intervened_importance IS NOT NULL
    )
    GROUP BY run_id, layer, operation, condition
);
