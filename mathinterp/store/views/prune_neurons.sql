-- prune_neurons: the neurons kept in the pruned layers, chosen (condition 'pruned') or drawn ('random', by seed).
CREATE OR REPLACE VIEW prune_neurons AS
SELECT run_id, condition, seed, layer, neuron
FROM ${prune_neurons};
