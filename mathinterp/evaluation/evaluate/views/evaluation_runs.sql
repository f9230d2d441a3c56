-- evaluation_runs: what each finished evaluation run asked of which model (shares of an unfinished one would mislead). method: base, precise, full, lora, or adapter where nothing
-- is known. base_fingerprint: the model that this one was made from (its own for a base). setting: options that were not at
-- their defaults. items and examples: digests; runs are comparable item by item where task, version, both digests and fewshot agree.
CREATE OR REPLACE VIEW evaluation_runs AS
SELECT run_id, parameters ->> 'task' AS task, model, model_fingerprint,
       coalesce(notes ->> 'base_fingerprint', model_fingerprint) AS base_fingerprint,
       coalesce(notes ->> 'method', 'base') AS method,
       dtype, parameters ->> 'setting' AS setting, (parameters ->> 'fewshot')::INTEGER AS fewshot,
       parameters ->> 'version' AS version, parameters ->> 'items' AS items, parameters ->> 'examples' AS examples, started_at
FROM runs
WHERE scan = 'evaluate' AND status = 'finished';
