-- path_pairs: the pairs of a path scan: scores of the first digit on X_r and X_c, and whether the pair was kept.
CREATE OR REPLACE VIEW path_pairs AS
SELECT run_id, prompt_id, correct, kept, logit_original, logit_counterfactual, logprob_original, logprob_counterfactual, predicted_id
FROM ${path_pairs};
