-- neuron_graph_edges: the stored edges of each graph, from a lower neuron to a higher, place 1 the strongest under the run's
-- measure. inner_product: <value, gate key + up key>, weights alone (paper A). signed_product: each key's product signed by
-- the factor it feeds and by the lower coefficient: positive = enlarges the upper coefficient's factors. first_order: what the
-- lower neuron adds to the upper one's |coefficient| along the direct path, to first order (engine/lens/graph.py has the
-- formulas); share: that over the mean |coefficient|. Means over the graph's n prompts, spreads divided by n.
CREATE OR REPLACE VIEW neuron_graph_edges AS
SELECT edges.run_id, edges.graph, edges.operation, place, edges.layer, edges.neuron, to_layer, to_neuron,
       edges.layer || '.' || edges.neuron AS lower_name, to_layer || '.' || to_neuron AS upper_name,
       inner_product, signed_product, signed_product_std, first_order, first_order_std,
       first_order / nullif(upper_node.coefficient_size, 0) AS share, edges.n
FROM ${neuron_graph_edges} AS edges
JOIN ${neuron_graph_nodes} AS upper_node
    ON upper_node.run_id = edges.run_id AND upper_node.graph = edges.graph
    AND upper_node.layer = to_layer AND upper_node.neuron = to_neuron;
