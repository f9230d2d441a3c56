-- edit_perplexity: what an edit costs on ordinary text. loss: nats a token over all passages; loss_change: loss - that of the
-- original model, with its 95 % normal interval, paired and clustered by passage (ratio estimator as in ablated_operations;
-- null for a single passage). perplexity = exp(loss); perplexity_ratio = exp(loss_change).
CREATE OR REPLACE VIEW edit_perplexity AS
SELECT run_id, edit, seed, passages, tokens, loss, exp(loss) AS perplexity, loss_change,
       loss_change - 1.959963984540054 * sqrt(variance) AS loss_change_low,
       loss_change + 1.959963984540054 * sqrt(variance) AS loss_change_high,
       exp(loss_change) AS perplexity_ratio
FROM (
    SELECT run_id, edit, seed, any_value(passages) AS passages, any_value(total) AS tokens,
           sum(-logprob) / any_value(total) AS loss, any_value(loss_change) AS loss_change,
           CASE WHEN any_value(passages) > 1 THEN
               any_value(passages) / (any_value(passages) - 1.0) * sum((worse - loss_change * tokens) ** 2)
               / any_value(total) ** 2 END AS variance
    FROM (
        SELECT *, count(*) OVER here AS passages, sum(tokens) OVER here AS total,
               sum(worse) OVER here / sum(tokens) OVER here AS loss_change
        FROM (
            SELECT t.run_id, t.edit, t.seed, t.passage, t.tokens::DOUBLE AS tokens, t.logprob, o.logprob - t.logprob AS worse
            FROM edit_text AS t
            JOIN edit_text AS o ON o.run_id = t.run_id AND o.passage = t.passage AND o.edit = 'original'
        )
        WINDOW here AS (PARTITION BY run_id, edit, seed)
    )
    GROUP BY run_id, edit, seed
);
