-- evaluation_pairs: two runs over the same items, the same few-shot context and scoring, item by item (other - this = difference
-- of accuracies, fractions). gained: wrong in this run and right in the other; lost: the other way. low, high: 95 % normal
-- interval of the difference, paired: variance n/(n-1) * (mean d^2 - difference^2) / n over the items' d in -1, 0, 1; null for one
-- item. p_value: exact two-sided McNemar test (binomial, 1/2, over gained + lost); 1 where nothing changed.
CREATE OR REPLACE VIEW evaluation_pairs AS
SELECT run_id, other_run_id, task, n, accuracy, other_accuracy, difference,
       difference - 1.959963984540054 * sqrt(variance) AS low, difference + 1.959963984540054 * sqrt(variance) AS high,
       gained, lost,
       least(1, 2 * list_sum(list_transform(range(least(gained, lost) + 1), lambda k:
           exp(lgamma(moved + 1) - lgamma(k + 1) - lgamma(moved - k + 1) - moved * ln(2))))) AS p_value
FROM (
    SELECT *, (other_hits - hits) / n AS difference, hits / n AS accuracy, other_hits / n AS other_accuracy,
           gained + lost AS moved,
           CASE WHEN n > 1 THEN ((gained + lost) / n - ((other_hits - hits) / n) ** 2) / (n - 1) END AS variance
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
