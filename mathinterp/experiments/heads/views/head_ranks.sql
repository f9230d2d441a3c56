-- head_ranks: the heads of each run by what they cost over all operations, dearest first (equal to 1e-12: lower layer first).
-- component: layer.head.
CREATE OR REPLACE VIEW head_ranks AS
SELECT run_id, layer, head, layer || '.' || head AS component,
       row_number() OVER (PARTITION BY run_id ORDER BY round(drop, 12) DESC, layer, head) AS rank
FROM ablation_effects
WHERE node = 'head' AND operation = 'all';
