-- paper_a_table10: relative increase (a fraction) of the coefficients of the top-50, 30, 20 and 10 neurons, mean over the layers of a band, in the
-- form of paper A's section 5. layers: how many the band has. run_id is the neuron scan's.
CREATE OR REPLACE VIEW paper_a_table10 AS
SELECT run_id, band, count(DISTINCT layer) AS layers,
       avg(increase) FILTER (k = 50) AS top50, avg(increase) FILTER (k = 30) AS top30,
       avg(increase) FILTER (k = 20) AS top20, avg(increase) FILTER (k = 10) AS top10
FROM (
    SELECT c.run_id, c.layer, c.k, c.increase, l.band
    FROM lora_sweep_coefficients AS c
    JOIN (SELECT run_id AS sweep, layer, any_value(band) AS band FROM lora_sweep_curve GROUP BY run_id, layer) AS l
        ON l.sweep = c.sweep AND l.layer = c.layer
)
WHERE band IS NOT NULL
GROUP BY run_id, band;
