-- head_operations: the operation-by-head matrix of each head scan: what ablating a head costs per operation, as a fraction
-- of 1 ("all": unweighted mean over the operations; null: the run has no such operation).
-- serves: the one operation in which the head costs more than 5 points while it costs no other more than 5; else null.
-- serves_q: the Benjamini-Hochberg q-value of that drop.
CREATE OR REPLACE VIEW head_operations AS
SELECT run_id, layer, head,
       max(drop) FILTER (operation = 'add') AS add,
       max(drop) FILTER (operation = 'sub') AS sub,
       max(drop) FILTER (operation = 'mul') AS mul,
       max(drop) FILTER (operation = 'div') AS div,
       max(drop) FILTER (operation = 'all') AS "all",
       CASE WHEN count(*) FILTER (costly) = 1 THEN max(operation) FILTER (costly) END AS serves,
       CASE WHEN count(*) FILTER (costly) = 1 THEN max(q_value) FILTER (costly) END AS serves_q,
       any_value(model) AS model, any_value(status) AS status
FROM (SELECT *, operation <> 'all' AND drop > 0.05 AS costly FROM head_effects)
GROUP BY run_id, layer, head;
