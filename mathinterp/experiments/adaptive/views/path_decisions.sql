-- path_decisions: what an adaptive scan (--decide) decided of each head and MLP (node; head null), a row each. Its drop is minus
-- the effect of path_effects over 'all' operations (the unweighted mean), of kept pairs, each pair's effect clipped to -1 and 1.
-- threshold: what the drop was compared with (a fraction); decision: 'above' it, 'not above' it, or 'open'. Of all decisions of a
-- run at most parameters.fdr are wrong on average, half of it per side (e-BH; docs/statistics.md). exact: certain, whatever the
-- prompts that were left out would say. prompts_used: by the decision, the first of the run's random order; prompts_run: computed,
-- more where a replica began a block before the last one was judged; cells: prompts of a full scan. e_above, e_below: e-values
-- against "at most" and "at least the threshold" (1: no evidence; infinite where certain). estimate: mean over the prompts used;
-- low, high: its interval of confidence 1 - fdr that holds at whatever look one stops, for one node and not for all together.
-- model, status: of the run.
CREATE OR REPLACE VIEW path_decisions AS
SELECT d.run_id, node, layer, head, threshold, decision, exact, prompts_used, prompts_run, cells, e_above, e_below,
       estimate, low, high, s.model, s.status
FROM ${decisions} AS d
JOIN run_states AS s USING (run_id)
JOIN run_records AS r USING (run_id)
WHERE r.scan = 'paths';
