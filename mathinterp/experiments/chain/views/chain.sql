-- chain: each prompt's chain, stage by stage (paper A, 4.4; experiments/chain says what the stages are). name: the neuron
-- (layer.neuron), head (layer.head) or token; via: the head that moves a shallow neuron's writing to END, or that was zeroed.
-- A shallow_neuron is of a layer before its via head's; a deep_neuron of its via head's layer or a later one (the deep
-- layers of maskkeep go by the model's depth instead).
-- strength is what the stage is ranked by: log-odds of w in nats to first order (shallow_neuron, attention), the
-- fall of the probability of w (head), the change of importance in nats (deep_neuron), the probability (prediction).
CREATE OR REPLACE VIEW chain AS
SELECT run_id, prompt_id, operation, stage, place,
       CASE WHEN stage = 'prediction' THEN token ELSE layer || '.' || unit END AS name,
       via_layer || '.' || via_head AS via, layer, unit, position, token, token_type, arithmetic, target,
       CASE stage WHEN 'head' THEN probability - probability_zeroed
                  WHEN 'deep_neuron' THEN change
                  WHEN 'prediction' THEN probability
                  ELSE effect END AS strength,
       weight, effect, exact_effect, deep_effect, from_neurons, importance, importance_zeroed, change, coefficient,
       coefficient_zeroed, logprob, logprob_zeroed, probability, probability_zeroed, tokens, token_id,
       list_position(['shallow_neuron', 'attention', 'head', 'deep_neuron', 'prediction'], stage) AS stage_number
FROM ${chain_scan};
