-- evaluation_pairs: two runs over the same items, the same few-shot context and scoring, item by item (other - this = difference
-- of accuracies, fractions). gained: wrong in this run and right in the other; lost: the other way. low, high: 95 % score
-- interval of the difference, paired (Tango 1998), and p_value, of the same statistic (docs/statistics.md).
CREATE OR REPLACE VIEW evaluation_pairs AS
SELECT run_id, other_run_id, task, n, accuracy, other_accuracy, difference,
       score_bound(difference, [part], -1) AS low, score_bound(difference, [part], 1) AS high,
       gained, lost, score_p(difference, [part]) AS p_value
FROM (
    SELECT *, (other_hits - hits) / n AS difference, hits / n AS accuracy, other_hits / n AS other_accuracy,
           struct_pack(prompts := n, drop := (gained - lost) / n, fell := gained / n, rose := lost / n,
                       units := n / (1 + 0.3 / (gained + lost + 1))) AS part
    FROM (
        SELECT a.run_id, b.run_id AS other_run_id, a.task, count(*) AS n,
               count(*) FILTER (WHERE x.correct) AS hits, count(*) FILTER (WHERE y.correct) AS other_hits,
               count(*) FILTER (WHERE NOT x.correct AND y.correct) AS gained,
               count(*) FILTER (WHERE x.correct AND NOT y.correct) AS lost
        FROM evaluation_runs AS a
        JOIN evaluation_runs AS b ON a.run_id <> b.run_id AND a.task = b.task AND a.version = b.version AND a.items = b.items
            AND a.fewshot = b.fewshot AND a.examples IS NOT DISTINCT FROM b.examples
        JOIN evaluations AS x ON x.run_id = a.run_id
        JOIN evaluations AS y ON y.run_id = b.run_id AND y.item_id = x.item_id
        GROUP BY ALL
    )
);
