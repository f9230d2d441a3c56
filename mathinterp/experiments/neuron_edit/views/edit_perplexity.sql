-- edit_perplexity: what an edit costs on ordinary text. loss: nats a token over all passages; loss_change: loss - that of the
-- original model, with its 95 % interval (Student's t), paired and clustered by passage (ratio estimator;
-- null for a single passage). perplexity = exp(loss); perplexity_ratio = exp(loss_change).
CREATE OR REPLACE VIEW edit_perplexity AS
SELECT run_id, edit, seed, passages, tokens, loss, exp(loss) AS perplexity, loss_change,
       loss_change - factor * sqrt(variance) AS loss_change_low,
       loss_change + factor * sqrt(variance) AS loss_change_high,
       exp(loss_change) AS perplexity_ratio
FROM (
    SELECT run_id, edit, seed, any_value(passages) AS passages, student_factor(any_value(passages)) AS factor, any_value(total) AS tokens,
           sum(-logprob) / any_value(total) AS loss, any_value(loss_change) AS loss_change,
           ratio_variance(worse, tokens) AS variance
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
