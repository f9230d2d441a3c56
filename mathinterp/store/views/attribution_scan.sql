-- attribution_scan: for each node and pair of a path scan, first_order: the estimated change of the logit (gradient at X_r
-- times X_c - X_r; logit_patched - logit_original is the exact one), and direct: the node's direct share of the logit on X_r.
CREATE OR REPLACE VIEW attribution_scan AS
SELECT run_id, node, layer, head, prompt_id, first_order, direct FROM ${attribution_scan};
