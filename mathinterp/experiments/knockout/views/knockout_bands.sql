-- knockout_bands: knockout_curve averaged over the random draws. accuracy: mean over seeds; lowest, highest: the least and
-- most of any seed. For ranking effect there is one curve, and all three are its accuracy.
CREATE OR REPLACE VIEW knockout_bands AS
SELECT run_id, ranking, k, operation, count(*) AS seeds,
       avg(accuracy) AS accuracy, min(accuracy) AS lowest, max(accuracy) AS highest, avg(logprob) AS logprob
FROM knockout_curve
GROUP BY run_id, ranking, k, operation;
