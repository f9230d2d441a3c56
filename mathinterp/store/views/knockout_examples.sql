-- knockout_examples: the likeliest next tokens of chosen sentences with the first k heads of the run's ranking knocked
-- out (paper B, Figure 4); k = 0 is the unchanged model, rank 1 the likeliest token.
CREATE OR REPLACE VIEW knockout_examples AS
SELECT run_id, sentence, k, rank, token_id, token, probability
FROM ${knockout_examples};
