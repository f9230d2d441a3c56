-- chain_summary: the chains of all prompts of an operation in one: per stage and name (neuron, head or token) and kind of token,
-- in how many of the n prompts it is stored (in_prompts, and share of them), and sums over those prompts divided by n: strength
-- (see chain), exact_effect and deep_effect. Only a prompt's first rows are stored, except for heads, so a sum leaves out
-- the rest; share says how far it can be trusted. leads: part of the prompts in which it ranks first. tokens: of its first
-- prompt. Operation 'all': the same over all prompts together.
CREATE OR REPLACE VIEW chain_summary AS
SELECT rows.run_id, rows.operation, stage, stage_number, name, via, token_type, in_prompts, n, in_prompts / n AS share,
       strength / n AS strength, exact_effect / n AS exact_effect, deep_effect / n AS deep_effect, leads / n AS leads,
       weight / in_prompts AS weight, tokens
FROM (
    SELECT run_id, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation, stage,
           any_value(stage_number) AS stage_number, name, via, token_type, count(DISTINCT prompt_id) AS in_prompts,
           sum(strength::DOUBLE) AS strength, sum(exact_effect::DOUBLE) AS exact_effect,
           sum(deep_effect::DOUBLE) AS deep_effect, count(DISTINCT prompt_id) FILTER (place = 1) AS leads,
           sum(weight::DOUBLE) AS weight, min_by(tokens, prompt_id) AS tokens
    FROM (
        SELECT run_id, operation, stage, stage_number, name, CASE stage WHEN 'shallow_neuron' THEN via END AS via, token_type,
               prompt_id, strength, exact_effect, deep_effect, place, weight, tokens
        FROM chain
    )
    GROUP BY GROUPING SETS ((run_id, operation, stage, name, via, token_type), (run_id, stage, name, via, token_type))
) AS rows
JOIN (
    SELECT run_id, CASE WHEN grouping(operation) = 1 THEN 'all' ELSE operation END AS operation,
           count(DISTINCT prompt_id) AS n
    FROM chain
    GROUP BY GROUPING SETS ((run_id, operation), (run_id))
) AS counts ON counts.run_id = rows.run_id AND counts.operation IS NOT DISTINCT FROM rows.operation;
