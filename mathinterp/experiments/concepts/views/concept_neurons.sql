-- concept_neurons: each scanned neuron with its best attention layer, the one through which it has most hits; ties: sign
-- plus first, then the lowest attention layer. Without a hit through any, attention_layer and sign are null.
-- direct_hits, direct_tokens: of the same value with no attention between (sign plus where none is best).
-- A neuron is kept at level M iff hits > M (paper A, section 4.4).
CREATE OR REPLACE VIEW concept_neurons AS
SELECT best.run_id, best.layer, best.neuron, best.attention_layer, best.hits, best.concepts, best.tokens, best.sign,
       direct.hits AS direct_hits, direct.tokens AS direct_tokens
FROM (
    SELECT run_id, layer, neuron,
           CASE WHEN hits > 0 THEN attention_layer END AS attention_layer,
           CASE WHEN hits > 0 THEN sign END AS sign,
           hits, concepts, tokens
    FROM concept_scan
    WHERE layer IS NOT NULL AND attention_layer IS NOT NULL
    QUALIFY row_number() OVER (
        PARTITION BY run_id, layer, neuron ORDER BY concept_scan.hits DESC, concept_scan.sign DESC, concept_scan.attention_layer
    ) = 1
) AS best
JOIN concept_scan AS direct
  ON direct.run_id = best.run_id AND direct.layer = best.layer AND direct.neuron = best.neuron
 AND direct.attention_layer IS NULL AND direct.sign = coalesce(best.sign, 1);
