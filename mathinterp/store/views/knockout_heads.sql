-- knockout_heads: the heads that are out at each point of a knock-out curve; place 1 is the first of its ranking.
CREATE OR REPLACE VIEW knockout_heads AS
SELECT run_id, ranking, seed, k, place, layer, head
FROM ${knockout_heads};
