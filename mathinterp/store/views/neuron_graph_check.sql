-- neuron_graph_check: coefficients at END of a graph's first k neurons before and after one neuron is zeroed at every
-- position: 'root', the lowest of them, or 'random', another neuron of its layer. The three measures are those of the edge
-- from the zeroed neuron to this one; null where this one's layer is not later, so that it cannot change.
CREATE OR REPLACE VIEW neuron_graph_check AS
SELECT run_id, graph, operation, prompt_id, k, zeroed, seed, zeroed_layer, zeroed_neuron, zeroed_coefficient, layer, neuron, coefficient,
       coefficient_zeroed, inner_product, signed_product, first_order
FROM ${neuron_graph_check};
