-- gender_professions: bias of each profession (nats, mean over the sentences) under each edit, beside the original model's.
CREATE OR REPLACE VIEW gender_professions AS
SELECT run_id, edit, seed, stereotype, profession, count(*) AS sentences, avg(b.bias) AS bias, avg(o.bias) AS original,
       avg(b.bias) - avg(o.bias) AS change
FROM gender_bias AS b
JOIN (SELECT run_id, stereotype, profession, template, bias FROM gender_bias WHERE edit = 'original') AS o
    USING (run_id, stereotype, profession, template)
GROUP BY run_id, edit, seed, stereotype, profession;
