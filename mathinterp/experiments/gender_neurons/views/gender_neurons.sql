-- gender_neurons: how much more each FFN neuron adds to professions after the gender they are stereotyped as than after the
-- other (nats, summed over professions; importance as in neuron_scan): change over all, change_woman and change_man over
-- those of one stereotype. rank 1 adds most to the stereotypes; ties by (layer, neuron).
CREATE OR REPLACE VIEW gender_neurons AS
SELECT run_id, row_number() OVER (PARTITION BY run_id ORDER BY change DESC, layer, neuron) AS rank, layer, neuron,
       change, change_woman, change_man, professions
FROM (
    SELECT run_id, layer, neuron, sum(change::DOUBLE) AS change,
           sum(change::DOUBLE) FILTER (stereotype = 'woman') AS change_woman,
           sum(change::DOUBLE) FILTER (stereotype = 'man') AS change_man,
           sum(professions)::BIGINT AS professions
    FROM ${gender_neurons}
    GROUP BY run_id, layer, neuron
);
