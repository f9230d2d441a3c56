-- edit_neurons: the neurons zeroed under each edit; rank 1 is the most important (random ones: in the order of the layers).
CREATE OR REPLACE VIEW edit_neurons AS
SELECT run_id, edit, seed, rank, layer, neuron
FROM ${edit_neurons};
