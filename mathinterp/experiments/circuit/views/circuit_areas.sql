-- circuit_areas: per prompt the area between its logit difference under a ranking's circuits and what MIB holds it against, over the
-- fractions of nodes by trapezoids: nothing (ordering signed), or the whole model (absolute; with the side of it on which the mean
-- is). Their mean over that of span is CPR, and CMD.
CREATE OR REPLACE VIEW circuit_areas AS
SELECT c.run_id, c.ranking_run, c.method, c.level, c.ablation, c.ordering, c.prompt_id, max(w.nodes) AS scored,
       any_value(e.whole) AS whole, any_value(e.nothing) AS nothing, any_value(e.span) AS span,
       sum(w.weight * CASE c.ordering WHEN 'signed' THEN c.metric - e.nothing ELSE w.side * (e.whole - c.metric) END) AS area
FROM circuit_metric AS c
JOIN circuit_ends AS e USING (run_id, prompt_id)
JOIN (
    SELECT run_id, ordering, fraction, nodes, sign(1 - faithfulness) AS side,
           (lead(fraction, 1, fraction) OVER curve - lag(fraction, 1, fraction) OVER curve) / 2 AS weight
    FROM circuit_curves
    WINDOW curve AS (PARTITION BY run_id, ordering ORDER BY fraction)
) AS w ON w.run_id = c.run_id AND w.ordering = c.ordering AND w.fraction = c.fraction
GROUP BY c.run_id, c.ranking_run, c.method, c.level, c.ablation, c.ordering, c.prompt_id;
