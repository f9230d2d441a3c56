-- operand_maps: the kept maps, a row for each unit and pair of operands; columns as in operand_units and operand_pairs.
CREATE OR REPLACE VIEW operand_maps AS
SELECT u.run_id, u.node, u.layer, u.head, u.neuron, u.measure, p.a, p.b, p.result, p.prompt_id, u.value
FROM (
    SELECT run_id, node, layer, head, neuron, measure, unnest(map) AS value,
           unnest(range(len(map)))::INTEGER AS place
    FROM operand_unit_maps
    WHERE map IS NOT NULL
) AS u
JOIN operand_pairs AS p USING (run_id, place);
