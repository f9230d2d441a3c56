-- concept_scan: every neuron of the scanned layers (layer null: random directions, as many as a layer has neurons) through
-- every attention layer's value-output matrix, and read directly (attention_layer null). hits: concepts among the run's
-- first `top` tokens, distinct ones or all tokens as its `count` says. concepts: JSON list of those found, likeliest first
-- (null: none); tokens: JSON list of the first ten tokens, kept where there is a hit and for what is read directly.
-- sign -1: the value's negative.
CREATE OR REPLACE VIEW concept_scan AS
SELECT run_id, layer, neuron, attention_layer, sign, hits, concepts, tokens
FROM ${concept_scan};
