-- ranking_agreement: how alike two methods rank heads, for every two runs (or two methods of one run) of one model, per
-- operation, over the heads that both have; the prompts may differ. Each pair is there in both directions. spearman: rank
-- correlation over all these heads, equal scores sharing their mean rank; null where one side is constant or ranks only some
-- heads (iterative masking). overlap_k: heads that are among the first k of both (equal scores: tie_break, then the lower
-- layer and head); chance_k: what two unrelated orders would share on average, k * k / heads. Null where there are not more
-- than k heads, or one side ranks fewer than k.
CREATE OR REPLACE VIEW ranking_agreement AS
SELECT run_id, method, other_run_id, other_method, operation, heads, spearman,
       CASE WHEN least(ranked, other_ranked) >= 5 AND heads > 5 THEN overlap_5 END AS overlap_5,
       CASE WHEN least(ranked, other_ranked) >= 5 AND heads > 5 THEN 25 / heads END AS chance_5,
       CASE WHEN least(ranked, other_ranked) >= 10 AND heads > 10 THEN overlap_10 END AS overlap_10,
       CASE WHEN least(ranked, other_ranked) >= 10 AND heads > 10 THEN 100 / heads END AS chance_10,
       CASE WHEN least(ranked, other_ranked) >= 20 AND heads > 20 THEN overlap_20 END AS overlap_20,
       CASE WHEN least(ranked, other_ranked) >= 20 AND heads > 20 THEN 400 / heads END AS chance_20
FROM (
    SELECT run_id, method, other_run_id, other_method, operation,
           count(*) AS heads, count(score) AS ranked, count(other_score) AS other_ranked,
           CASE WHEN count(score) = count(*) AND count(other_score) = count(*)
                     AND min(score) < max(score) AND min(other_score) < max(other_score)
                THEN corr(rank, other_rank) END AS spearman,
           count_if(place <= 5 AND other_place <= 5)::BIGINT AS overlap_5,
           count_if(place <= 10 AND other_place <= 10)::BIGINT AS overlap_10,
           count_if(place <= 20 AND other_place <= 20)::BIGINT AS overlap_20
    FROM (
        SELECT a.run_id, a.method, b.run_id AS other_run_id, b.method AS other_method, a.operation,
               a.score, b.score AS other_score,
               rank() OVER (PARTITION BY a.run_id, a.method, b.run_id, b.method, a.operation ORDER BY a.score)
                   + (count(*) OVER (PARTITION BY a.run_id, a.method, b.run_id, b.method, a.operation, a.score) - 1) / 2 AS rank,
               rank() OVER (PARTITION BY a.run_id, a.method, b.run_id, b.method, a.operation ORDER BY b.score)
                   + (count(*) OVER (PARTITION BY a.run_id, a.method, b.run_id, b.method, a.operation, b.score) - 1) / 2
                   AS other_rank,
               row_number() OVER (PARTITION BY a.run_id, a.method, b.run_id, b.method, a.operation
                   ORDER BY a.score DESC NULLS LAST, a.tie_break DESC NULLS LAST, a.layer, a.head) AS place,
               row_number() OVER (PARTITION BY a.run_id, a.method, b.run_id, b.method, a.operation
                   ORDER BY b.score DESC NULLS LAST, b.tie_break DESC NULLS LAST, b.layer, b.head) AS other_place
        FROM head_rankings AS a
        JOIN run_records AS ra ON ra.run_id = a.run_id
        JOIN head_rankings AS b ON b.operation = a.operation AND b.layer = a.layer AND b.head = a.head
        JOIN run_records AS rb ON rb.run_id = b.run_id
        WHERE ra.model_fingerprint = rb.model_fingerprint AND (a.run_id <> b.run_id OR a.method <> b.method)
    )
    GROUP BY run_id, method, other_run_id, other_method, operation
);
