-- paper_a_table8: relative decrease (a fraction) of accuracy with all neurons of a level at zero, its 95 % interval over prompts, and
-- the mean, least and most decrease of the random sets of the same size per layer (null: a layer has too few others), in
-- the form of paper A, Table 8.
CREATE OR REPLACE VIEW paper_a_table8 AS
SELECT run_id, level, zeroed AS neurons, operation, n,
       any_value(relative_drop) FILTER (kept) AS decrease,
       any_value(low) FILTER (kept) AS low,
       any_value(high) FILTER (kept) AS high,
       avg(relative_drop) FILTER (NOT kept) AS random,
       min(relative_drop) FILTER (NOT kept) AS random_least,
       max(relative_drop) FILTER (NOT kept) AS random_most,
       count_if(NOT kept) AS random_sets
FROM (SELECT *, neurons = 'concepts' AS kept FROM concept_zeroing_effects)
GROUP BY run_id, level, zeroed, operation, n;
