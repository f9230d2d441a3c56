-- stability: how far the ranking of a scan's nodes hangs on its prompts, per operation: the ranking worked out again under
-- draws of the operation's prompts with replacement (over 'prompts'), or of its templates with all their prompts ('templates').
-- rank: under the run's own prompts, among nodes of its kind (node). rank_low, rank_high: hold 95 % of the draws.
-- in_first_k: share of draws in which the node is among the first k; null where there are not more than k nodes. known: share
-- of prompts whose own value is stored; under 1 (neurons), the node varies more than is shown (docs/statistics.md).
CREATE OR REPLACE VIEW stability AS
SELECT s.run_id, over, operation, node, layer, CASE WHEN node = 'head' THEN unit END AS head,
       CASE WHEN node = 'neuron' THEN unit END AS neuron, unit, rank, rank_low, rank_high,
       in_first_5, in_first_10, in_first_32, known, draws, seed
FROM stability_runs AS s
JOIN stability_nodes AS n ON n.run_id = s.computation
WHERE shown;
