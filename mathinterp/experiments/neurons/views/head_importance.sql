-- head_importance: per prompt the log-probability increase (nats) of every head's output at END, added to the layer's input;
-- scored as the neurons of neuron_scan are. condition: 'original' or 'intervened'.
CREATE OR REPLACE VIEW head_importance AS
SELECT run_id, prompt_id, 'original' AS condition, layer, unit::SMALLINT AS head, importance
FROM ${neuron_scan}
WHERE node = 'head'
UNION ALL
SELECT run_id, prompt_id, 'intervened' AS condition, layer, unit::SMALLINT AS head, intervened_importance AS importance
FROM ${neuron_scan}
WHERE node = 'head' AND intervened_importance IS NOT NULL;
