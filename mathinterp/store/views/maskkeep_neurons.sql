-- maskkeep_neurons: each prompt's neurons that are masked, or kept; those of places up to k. A random neuron has the layer of
-- the neuron of ranking top at its place.
CREATE OR REPLACE VIEW maskkeep_neurons AS
SELECT run_id, ranking, seed, prompt_id, place, layer, neuron
FROM ${maskkeep_neurons};
