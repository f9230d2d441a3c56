-- head_transfer: whether heads found on one model carry over to another: for every two runs that rank the heads of different
-- models by the same method (see head_rankings), as many heads in each, per operation. spearman: rank correlation, equal
-- scores sharing their mean rank; null where one side is constant or ranks only some heads. overlap_10: how many of the first
-- ten are the same (equal scores: tie_break, then the lower layer and head); chance_10: what unrelated orders would share.
-- same_prompts: both had the same prompts, tokens included. Each pair is there in both directions.
CREATE OR REPLACE VIEW head_transfer AS
WITH placed AS (
    SELECT h.*, r.model, r.model_fingerprint, r.prompts_fingerprint, count(*) OVER here AS total,
           rank() OVER (here ORDER BY score)
               + (count(*) OVER (PARTITION BY run_id, method, operation, score) - 1) / 2 AS rank,
           row_number() OVER (here ORDER BY score DESC NULLS LAST, tie_break DESC NULLS LAST, layer, head) AS place
    FROM head_rankings AS h
    JOIN run_records AS r USING (run_id)
    WINDOW here AS (PARTITION BY run_id, method, operation)
)
SELECT run_id, other_run_id, any_value(model) AS model, any_value(other_model) AS other_model, method, operation,
       count(*) AS heads,
       CASE WHEN count(score) = count(*) AND count(other_score) = count(*) AND min(score) < max(score)
                 AND min(other_score) < max(other_score) THEN corr(rank, other_rank) END AS spearman,
       count_if(place <= 10 AND other_place <= 10) AS overlap_10, least(10, count(*)) ** 2 / count(*) AS chance_10,
       any_value(same_prompts) AS same_prompts
FROM (
    SELECT a.run_id, b.run_id AS other_run_id, a.model, b.model AS other_model, method, operation, a.score,
           b.score AS other_score, a.rank, b.rank AS other_rank, a.place, b.place AS other_place,
           a.prompts_fingerprint = b.prompts_fingerprint AS same_prompts
    FROM placed AS a
    JOIN placed AS b USING (method, operation, layer, head)
    WHERE a.run_id <> b.run_id AND a.model_fingerprint <> b.model_fingerprint AND a.total = b.total
)
GROUP BY run_id, other_run_id, method, operation;
