-- stability_overlap: how alike the first k nodes of a scan are under other draws of its prompts or templates (see stability).
-- jaccard: mean over draws of |A and B| / |A or B|, A being the first k under the draw, B under the run's own prompts;
-- jaccard_low, jaccard_high hold 95 % of the draws. pairwise: the mean for any two draws, which is lower; above_bar: it
-- reaches the bar of 0.8 (arXiv 2510.00845; docs/statistics.md). nodes: as many are ranked; no row where they are not more than k. units:
-- prompts or templates of the smallest operation; a draw of under 5 templates means little.
CREATE OR REPLACE VIEW stability_overlap AS
SELECT s.run_id, over, operation, node, k, jaccard, jaccard_low, jaccard_high, pairwise, 0.8::DOUBLE AS bar,
       pairwise >= 0.8 AS above_bar, nodes, units, draws, seed
FROM stability_runs AS s
JOIN stability_overlaps AS o ON o.run_id = s.computation
WHERE shown;
