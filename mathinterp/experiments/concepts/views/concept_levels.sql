-- concept_levels: how many neurons of each layer are kept at each level M, from 0 to the run's most hits: those with
-- hits > M through their best attention layer. layer null: over all layers. direct: with hits > M when the value is read
-- directly. share: kept / total.
CREATE OR REPLACE VIEW concept_levels AS
SELECT run_id, level, layer, kept, direct, total, kept / total AS share
FROM (
    SELECT n.run_id, l.level, n.layer,
           coalesce(sum(n.neurons) FILTER (n.hits > l.level), 0)::BIGINT AS kept,
           coalesce(sum(n.neurons) FILTER (n.direct_hits > l.level), 0)::BIGINT AS direct,
           sum(n.neurons)::BIGINT AS total
    FROM (
        SELECT run_id, layer, hits, direct_hits, count(*) AS neurons FROM concept_neurons GROUP BY ALL
    ) AS n
    JOIN (
        SELECT run_id, unnest(range(0, max(hits) + 1))::INTEGER AS level FROM concept_scan GROUP BY run_id
    ) AS l USING (run_id)
    GROUP BY GROUPING SETS ((n.run_id, l.level, n.layer), (n.run_id, l.level))
);
