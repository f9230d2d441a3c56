-- neuron_graph_agreement: do edges tell what zeroing the root does? Per prompt and k, over the neurons of later layers, Spearman's
-- rank correlation of each measure of the edge from the root with the fall of that neuron's |coefficient| ((c - c_zeroed)
-- sign(c)); then the mean over the prompts that have 3 such neurons or more, not all alike. The sign of inner_product says
-- nothing before the coefficients' signs do, so it is multiplied by both here. first_order_pearson compares
-- first_order by value with the fall that it estimates.
CREATE OR REPLACE VIEW neuron_graph_agreement AS
SELECT run_id, operation, k, count(*) AS n, avg(inner_product) AS inner_product, avg(signed_product) AS signed_product,
       avg(first_order) AS first_order, avg(pearson) AS first_order_pearson
FROM (
    SELECT run_id, graph, operation, prompt_id, k, CASE WHEN min(first_rank) < max(first_rank) THEN corr(first_order, fall) END AS pearson,
           CASE WHEN min(inner_rank) < max(inner_rank) THEN corr(inner_rank, fall_rank) END AS inner_product,
           CASE WHEN min(signed_rank) < max(signed_rank) THEN corr(signed_rank, fall_rank) END AS signed_product,
           CASE WHEN min(first_rank) < max(first_rank) THEN corr(first_rank, fall_rank) END AS first_order
    FROM (
        SELECT run_id, graph, operation, prompt_id, k, fall, first_order,
               rank() OVER (same ORDER BY fall) + (count(*) OVER (PARTITION BY run_id, graph, prompt_id, k, fall) - 1) / 2
                   AS fall_rank,
               rank() OVER (same ORDER BY inner_signed)
                   + (count(*) OVER (PARTITION BY run_id, graph, prompt_id, k, inner_signed) - 1) / 2 AS inner_rank,
               rank() OVER (same ORDER BY signed_product)
                   + (count(*) OVER (PARTITION BY run_id, graph, prompt_id, k, signed_product) - 1) / 2 AS signed_rank,
               rank() OVER (same ORDER BY first_order)
                   + (count(*) OVER (PARTITION BY run_id, graph, prompt_id, k, first_order) - 1) / 2 AS first_rank
        FROM (
            SELECT *, (coefficient::DOUBLE - coefficient_zeroed) * sign(coefficient) AS fall,
                   inner_product * sign(zeroed_coefficient) * sign(coefficient) AS inner_signed
            FROM ${neuron_graph_check}
            WHERE zeroed = 'root' AND first_order IS NOT NULL
        )
        WINDOW same AS (PARTITION BY run_id, graph, prompt_id, k)
    )
    GROUP BY run_id, graph, operation, prompt_id, k
    HAVING count(*) >= 3 AND min(fall_rank) < max(fall_rank)
)
GROUP BY run_id, operation, k;
