-- paper_a_table22: bias (nats, mean over the sentences) of each profession stereotyped as woman's, before and after the edit,
-- in the form of paper A's appendix; random: mean over the draws of random neurons.
CREATE OR REPLACE VIEW paper_a_table22 AS
SELECT run_id, profession, any_value(original) AS original, avg(bias) FILTER (edit = 'edited') AS edited,
       avg(bias) FILTER (edit = 'random') AS random
FROM gender_professions
WHERE stereotype = 'woman'
GROUP BY run_id, profession;
