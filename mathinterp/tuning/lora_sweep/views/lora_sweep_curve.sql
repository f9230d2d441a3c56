-- lora_sweep_curve: accuracy by the layer that has the LoRA, at the learning rate chosen for it, per operation and over 'all',
-- with intervals (see tuned_accuracy), beside the original model's. depth: 32 layer / layers, the layer's place in a model of
-- 32 layers; band: paper A's, by depth: '1-9', '10-16', '17-30', null outside them.
CREATE OR REPLACE VIEW lora_sweep_curve AS
SELECT a.run_id, a.layer, a.operation, a.learning_rate, a.n, a.baseline_accuracy, a.accuracy, a.low, a.high, a.gain, a.gain_low,
       a.gain_high, a.p_value, a.baseline_low, a.baseline_high, 32.0 * a.layer / (r.notes ->> 'n_layers')::INTEGER AS depth,
       CASE WHEN depth >= 1 AND depth < 10 THEN '1-9' WHEN depth >= 10 AND depth < 17 THEN '10-16'
            WHEN depth >= 17 AND depth < 31 THEN '17-30' END AS band
FROM tuned_accuracy AS a
JOIN lora_sweep_trials AS t ON t.run_id = a.run_id AND t.layer = a.layer AND t.learning_rate = a.learning_rate AND t.chosen
JOIN run_records AS r ON r.run_id = a.run_id
WHERE r.scan = 'lora_sweep';
