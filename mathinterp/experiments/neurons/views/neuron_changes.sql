-- neuron_changes: per prompt the neurons whose importance changed most, all layers ranked together, rank 1 first; ties by
-- (layer, neuron). change = original - intervened, or tuned - original where another model was compared; null, and ranked by
-- importance, where nothing was. The run's parameter 'rank' says by what: difference, abs (size of the change) or ratio
-- (change / |importance|). in_top: rank <= the run's `top`; further ranks are there with --keep all alone.
CREATE OR REPLACE VIEW neuron_changes AS
SELECT run_id, prompt_id, operation, layer, neuron, rank, rank <= top AS in_top, importance, intervened_importance, change,
       coefficient, intervened_coefficient, coefficient_change
FROM (
    SELECT *, row_number() OVER (PARTITION BY run_id, prompt_id ORDER BY ranked_by DESC, layer, neuron) AS rank
    FROM (
        SELECT p.*, top, keeps_all, neuron_rank_key(ranking, change, importance) AS ranked_by
        FROM neuron_prompts AS p
        JOIN neuron_runs USING (run_id)
    )
)
WHERE keeps_all OR rank <= top;
