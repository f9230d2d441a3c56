-- edit_text: ordinary text with the same neurons zeroed: tokens scored in each passage, and their summed log-probability.
CREATE OR REPLACE VIEW edit_text AS
SELECT run_id, edit, seed, passage, tokens, logprob
FROM ${edit_text};
