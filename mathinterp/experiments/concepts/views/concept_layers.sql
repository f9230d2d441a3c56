-- concept_layers: where neurons become interpretable: for each pair of neuron layer (null: random directions) and attention
-- layer (null: read directly) the vectors with a hit, the mean and most hits, and for how many neurons this attention
-- layer is the best.
CREATE OR REPLACE VIEW concept_layers AS
SELECT s.run_id, s.layer, s.attention_layer, count(*) AS n, count_if(s.hits > 0) AS with_hits,
       avg(s.hits) AS mean_hits, max(s.hits) AS most_hits, count_if(n.neuron IS NOT NULL) AS best_of
FROM concept_scan AS s
LEFT JOIN concept_neurons AS n
  ON n.run_id = s.run_id AND n.layer = s.layer AND n.neuron = s.neuron
 AND n.attention_layer = s.attention_layer AND n.sign = s.sign
GROUP BY s.run_id, s.layer, s.attention_layer;
