-- lora_sweep_coefficients: how much a layer's LoRA enlarges the coefficients of the k neurons it enhances most, over all
-- prompts: mean (tuned - original) sign(original) / mean |original| (method.md section 5), k = 50, 30, 20, 10. opposing:
-- share of those neurons whose importance was below 0 before (they are enhanced by shrinking); increase_supporting: the
-- increase of the others alone. run_id is the neuron scan's, sweep the sweep's.
CREATE OR REPLACE VIEW lora_sweep_coefficients AS
SELECT s.run_id, any_value(r.parameters ->> 'sweep') AS sweep, s.tuned_layer AS layer, k, count(DISTINCT s.prompt_id) AS prompts,
       sum((s.tuned_coefficient::DOUBLE - s.coefficient) * sign(s.coefficient)) / nullif(sum(abs(s.coefficient::DOUBLE)), 0)
           AS increase,
       sum((s.tuned_coefficient::DOUBLE - s.coefficient) * sign(s.coefficient)) FILTER (s.importance >= 0)
           / nullif(sum(abs(s.coefficient::DOUBLE)) FILTER (s.importance >= 0), 0) AS increase_supporting,
       avg((s.importance < 0)::INTEGER) AS opposing,
       sum(s.tuned_importance::DOUBLE - s.importance) / count(DISTINCT s.prompt_id) AS importance_increase
FROM sweep_neurons AS s
JOIN run_records AS r USING (run_id)
JOIN (SELECT unnest([50, 30, 20, 10]) AS k) AS sizes ON s.rank <= k
GROUP BY s.run_id, s.tuned_layer, k;
