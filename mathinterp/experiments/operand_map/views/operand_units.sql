-- operand_units: what the map of a head or neuron over the pairs (a, b) says. measure: 'coefficient' of a neuron; of a head
-- 'norm' (of what it adds to o_proj's output) and 'answer' (its direct share in the logit of the first answer token, less the
-- mean logit; it follows that token by itself, whatever the head does). heuristic: the one with the largest auroc; high: the
-- unit is above where it holds (else below; auroc counts either way). shuffled: the largest auroc of any heuristic with the
-- pairs shuffled. explained: share of the map's variance between the classes that the heuristic is one of. auroc_...: the best
-- heuristic of each family. power_10: share of power (variance) at period 10 along a, b, a + b and a - b together; power_sum_10
-- and the like: of each. direct: of a neuron as 'answer' of a head, mean over pairs; effect: first-order change of the log-odds
-- of that token (nats) if the neuron were ablated at END (its mean, or 0: the run's ablation), mean over the sampled pairs;
-- effect_size: of its size, which ranks the neurons that are kept.
CREATE OR REPLACE VIEW operand_units AS
SELECT run_id, node, layer || '.' || coalesce(head, neuron) AS unit, measure, heuristic, high, auroc, shuffled, explained,
       * EXCLUDE (run_id, node, measure, heuristic, high, auroc, shuffled, explained, map, model, status),
       map IS NOT NULL AS map_kept, model, status
FROM operand_unit_maps
JOIN run_states USING (run_id);
