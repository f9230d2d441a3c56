-- paper_a_table17: the neurons of a run, most hits first (ties by layer and neuron), with the first tokens of their value
-- read directly and after their best attention layer, in the form of paper A, Table 17, which writes
-- a neuron layer_neuron where this has layer.neuron, as all tables here. Line breaks are written out;
-- neurons without a hit are left out.
CREATE OR REPLACE VIEW paper_a_table17 AS
SELECT run_id, row_number() OVER (PARTITION BY run_id ORDER BY hits DESC, layer, neuron) AS rank,
       layer || '.' || neuron AS neuron, attention_layer, sign, hits, direct_hits,
       replace(replace(array_to_string(direct_tokens::JSON::VARCHAR[], ' | '), chr(10), '\n'), chr(13), '\r') AS direct_tokens,
       replace(replace(array_to_string(tokens::JSON::VARCHAR[], ' | '), chr(10), '\n'), chr(13), '\r') AS transformed_tokens,
       array_to_string(concepts::JSON::VARCHAR[], ' ') AS concepts
FROM concept_neurons
WHERE hits > 0;
