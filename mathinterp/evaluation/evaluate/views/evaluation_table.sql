-- evaluation_table: accuracies (fractions) in the form of paper B's table: a row per model and setting, the base first; beside each task
-- its 95 % interval (_low, _high) and the p of the paired difference (score test) from the base (_p).
-- signed_two_digit_test is paper A's test set by greedy decoding; signed_two_digit_train has none of its operand pairs.
-- Newest runs only. Other prompt sets, counts and differences: view evaluation_results.
CREATE OR REPLACE VIEW evaluation_table AS
SELECT method, model, setting, dtype,
       any_value(accuracy) FILTER (WHERE task = 'gsm8k') AS gsm8k, any_value(low) FILTER (WHERE task = 'gsm8k') AS gsm8k_low,
       any_value(high) FILTER (WHERE task = 'gsm8k') AS gsm8k_high, any_value(p_value) FILTER (WHERE task = 'gsm8k') AS gsm8k_p,
       any_value(accuracy) FILTER (WHERE task = 'svamp') AS svamp, any_value(low) FILTER (WHERE task = 'svamp') AS svamp_low,
       any_value(high) FILTER (WHERE task = 'svamp') AS svamp_high, any_value(p_value) FILTER (WHERE task = 'svamp') AS svamp_p,
       any_value(accuracy) FILTER (WHERE task = 'addsub') AS addsub, any_value(low) FILTER (WHERE task = 'addsub') AS addsub_low,
       any_value(high) FILTER (WHERE task = 'addsub') AS addsub_high, any_value(p_value) FILTER (WHERE task = 'addsub') AS addsub_p,
       any_value(accuracy) FILTER (WHERE task = 'singleeq') AS singleeq, any_value(low) FILTER (WHERE task = 'singleeq') AS singleeq_low,
       any_value(high) FILTER (WHERE task = 'singleeq') AS singleeq_high, any_value(p_value) FILTER (WHERE task = 'singleeq') AS singleeq_p,
       any_value(accuracy) FILTER (WHERE task = 'multiarith') AS multiarith, any_value(low) FILTER (WHERE task = 'multiarith') AS multiarith_low,
       any_value(high) FILTER (WHERE task = 'multiarith') AS multiarith_high, any_value(p_value) FILTER (WHERE task = 'multiarith') AS multiarith_p,
       any_value(accuracy) FILTER (WHERE task = 'mmlu') AS mmlu, any_value(low) FILTER (WHERE task = 'mmlu') AS mmlu_low,
       any_value(high) FILTER (WHERE task = 'mmlu') AS mmlu_high, any_value(p_value) FILTER (WHERE task = 'mmlu') AS mmlu_p,
       any_value(accuracy) FILTER (WHERE task = 'commonsense_qa') AS commonsense_qa, any_value(low) FILTER (WHERE task = 'commonsense_qa') AS commonsense_qa_low,
       any_value(high) FILTER (WHERE task = 'commonsense_qa') AS commonsense_qa_high, any_value(p_value) FILTER (WHERE task = 'commonsense_qa') AS commonsense_qa_p,
       any_value(accuracy) FILTER (WHERE task = 'signed_two_digit_test') AS signed_two_digit_test, any_value(low) FILTER (WHERE task = 'signed_two_digit_test') AS signed_two_digit_test_low,
       any_value(high) FILTER (WHERE task = 'signed_two_digit_test') AS signed_two_digit_test_high, any_value(p_value) FILTER (WHERE task = 'signed_two_digit_test') AS signed_two_digit_test_p
FROM evaluation_results
WHERE newest
GROUP BY method, model, setting, dtype, model_fingerprint, base_fingerprint
ORDER BY base_fingerprint, setting, model_fingerprint <> base_fingerprint, model;
