-- path_agreement: whether measures of path patching rank the nodes of a run alike, per operation. Over its heads and MLPs,
-- Spearman's rank correlations: raw logit effects with changes of log-probability (raw logits can move by a constant that no
-- prediction sees: below 0.5 distrust them), and first-order attribution with the exact change of the logit, which
-- first_order_pearson compares by value. Null where one side is constant or was not computed.
CREATE OR REPLACE VIEW path_agreement AS
SELECT run_id, operation, count(*) AS nodes,
       CASE WHEN min(logit_rank) < max(logit_rank) AND min(logprob_rank) < max(logprob_rank) THEN
           corr(logit_rank, logprob_rank) END AS logit_logprob,
       CASE WHEN count(first_order) = count(*) AND min(exact_rank) < max(exact_rank) AND min(first_rank) < max(first_rank) THEN
           corr(exact_rank, first_rank) END AS first_order_rank,
       CASE WHEN count(first_order) = count(*) AND min(exact_rank) < max(exact_rank) AND min(first_rank) < max(first_rank) THEN
           corr(logit_change, first_order) END AS first_order_pearson
FROM (
    SELECT e.run_id, e.operation, e.logit_change, a.first_order,
           rank() OVER (PARTITION BY e.run_id, e.operation ORDER BY e.logit_effect)
               + (count(*) OVER (PARTITION BY e.run_id, e.operation, e.logit_effect) - 1) / 2 AS logit_rank,
           rank() OVER (PARTITION BY e.run_id, e.operation ORDER BY e.logprob_change)
               + (count(*) OVER (PARTITION BY e.run_id, e.operation, e.logprob_change) - 1) / 2 AS logprob_rank,
           rank() OVER (PARTITION BY e.run_id, e.operation ORDER BY e.logit_change)
               + (count(*) OVER (PARTITION BY e.run_id, e.operation, e.logit_change) - 1) / 2 AS exact_rank,
           rank() OVER (PARTITION BY e.run_id, e.operation ORDER BY a.first_order)
               + (count(*) OVER (PARTITION BY e.run_id, e.operation, a.first_order) - 1) / 2 AS first_rank
    FROM path_effects AS e
    LEFT JOIN attribution_effects AS a
        ON a.run_id = e.run_id AND a.operation = e.operation AND a.node = e.node AND a.layer = e.layer
        AND a.head IS NOT DISTINCT FROM e.head
)
GROUP BY run_id, operation;
