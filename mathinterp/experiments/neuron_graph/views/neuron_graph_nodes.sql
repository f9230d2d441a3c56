-- neuron_graph_nodes: the neurons of each prediction-enhancing graph (paper A, 4.3): the first of one prompt, or of one
-- operation in the mean ("all": over all). importance and change (nats) are the neuron scan's; coefficient is the mean over
-- the graph's n prompts, coefficient_size of its absolute value; tokens: a JSON list, the first of Lens(c v), with the sign of that mean. root: the lowest node.
CREATE OR REPLACE VIEW neuron_graph_nodes AS
SELECT run_id, graph, operation, layer, neuron, layer || '.' || neuron AS name, rank, root, importance, change, coefficient,
       coefficient_size, tokens, n
FROM ${neuron_graph_nodes};
