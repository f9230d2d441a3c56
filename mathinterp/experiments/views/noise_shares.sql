-- noise_shares: per run of ablations, the share of answers whose prediction a change of nothing flips in the run's dtype, as
-- measured on some of its prompts (runs.notes); null where the run did not note it.
CREATE OR REPLACE VIEW noise_shares AS
SELECT run_id, (notes -> 'noise_floor' ->> 'flipped_predictions')::DOUBLE
               / (notes -> 'noise_floor' ->> 'answers')::DOUBLE AS noise
FROM run_records;
