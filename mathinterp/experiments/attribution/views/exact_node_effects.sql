-- exact_node_effects: what attribution estimates, measured: per head or MLP and prompt, the change of the logit difference, answer
-- minus distractor at END, with the node's output as on the counterfactual. From runs of scan heads and scan mlps with ablation
-- resample on prompts with distractors. positions: the tokens at which it is replaced, all or end.
CREATE OR REPLACE VIEW exact_node_effects AS
SELECT s.run_id, s.node, s.layer, s.head, s.prompt_id, s.logit_difference - b.logit_difference AS effect,
       r.parameters ->> 'positions' AS positions
FROM (
    SELECT run_id, 'head' AS node, layer, head, prompt_id, position, logit_difference FROM head_scan_logit_differences
    UNION ALL
    SELECT run_id, 'mlp' AS node, layer, NULL::SMALLINT AS head, prompt_id, position, logit_difference
    FROM mlp_scan_logit_differences
) AS s
JOIN baseline_logit_differences AS b USING (run_id, prompt_id, position)
JOIN run_records AS r USING (run_id)
WHERE s.position = 0 AND r.parameters ->> 'ablation' = 'resample';
