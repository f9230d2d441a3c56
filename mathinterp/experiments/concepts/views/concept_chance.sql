-- concept_chance: what attention makes of anything. For each attention layer (null: read directly) and level M, the share of
-- neurons and of random directions with hits > M through it, over all signs; pairs: neurons read through it. Compare these
-- shares, not those of concept_levels, which take the best of several attention layers.
CREATE OR REPLACE VIEW concept_chance AS
SELECT s.run_id, s.attention_layer, l.level,
       coalesce(sum(s.n) FILTER (NOT s.random AND s.hits > l.level), 0) / sum(s.n) FILTER (NOT s.random) AS neurons,
       coalesce(sum(s.n) FILTER (s.random AND s.hits > l.level), 0) / sum(s.n) FILTER (s.random) AS random,
       (sum(s.n) FILTER (NOT s.random))::BIGINT AS pairs
FROM (
    SELECT run_id, attention_layer, layer IS NULL AS random, hits, count(*) AS n FROM concept_scan GROUP BY ALL
) AS s
JOIN (
    SELECT run_id, unnest(range(0, max(hits) + 1))::INTEGER AS level FROM concept_scan GROUP BY run_id
) AS l USING (run_id)
GROUP BY s.run_id, s.attention_layer, l.level;
