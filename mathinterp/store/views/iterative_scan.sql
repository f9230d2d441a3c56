-- iterative_scan: iterative masking. In step s every head left is masked together with the s heads masked before it; the
-- one that costs most is the step's choice (masked). accuracy_before, accuracy: fractions, unweighted mean over
-- operations, without and with this head masked; logprob_change: natural log, per unit, what this head adds.
CREATE OR REPLACE VIEW iterative_scan AS
SELECT run_id, step, layer, head, masked, accuracy_before, accuracy, logprob_change
FROM ${iterative_scan};
