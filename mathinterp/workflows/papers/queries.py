"""SQL that several items share. Each gives what, unit, rank, value, low, high (95 % interval) and n, prompts of the
smallest operation; $units are the units that a paper prints, which are read whatever their rank.
"""

SYMBOLS = "template = 'symbols'"  # the last prompt of paper A's Table 14, as its appendix E takes it


def _prompts(stage: str, where: str) -> str:
    return f"""asked AS (
    SELECT p.prompt_id, p.operation FROM prompts AS p
    JOIN run_records AS r ON r.prompts_fingerprint = p.prompts_fingerprint
    WHERE r.run_id = ${stage} AND {where}
),
counted AS (
    SELECT a.* FROM ablated_prompts AS a JOIN asked USING (prompt_id) WHERE run_id = ${stage} AND node = 'head'
)"""


def head_accuracies(stage: str, where: str = "true", label: str = "", over_all: bool = False) -> str:
    """Accuracy, original and under the heads that cost most; ``over_all`` adds the mean over operations."""
    sets = "(layer, head, operation), (layer, head)" if over_all else "(layer, head, operation)"
    return f"""WITH {_prompts(stage, where)},
own AS (
    SELECT layer, head, operation, count(*) AS n, sum(hits) / sum(n) AS accuracy, share_part(hits, n) AS part,
           sum(baseline_hits) / sum(n) AS original, share_part(baseline_hits, n) AS original_part
    FROM counted GROUP BY layer, head, operation
),
ranked AS (
    SELECT layer, head, layer || '.' || head AS unit,
           row_number() OVER (ORDER BY round(avg(accuracy), 12), layer, head) AS rank
    FROM own GROUP BY layer, head
),
whole AS (
    SELECT layer, head, coalesce(operation, 'all') AS operation, min(n) AS n, avg(accuracy) AS accuracy,
           avg(original) AS original, list(part ORDER BY operation) AS parts,
           list(original_part ORDER BY operation) AS original_parts
    FROM own JOIN ranked USING (layer, head)
    WHERE rank <= 5 OR list_contains($units, unit)
    GROUP BY GROUPING SETS ({sets})
)
SELECT '{label}' || operation AS what, unit, rank, accuracy AS value,
       share_bound(accuracy, parts, -1) AS low, share_bound(accuracy, parts, 1) AS high, n
FROM whole JOIN ranked USING (layer, head)
UNION ALL
SELECT '{label}' || operation, 'original', 0, original, share_bound(original, original_parts, -1),
       share_bound(original, original_parts, 1), n
FROM whole JOIN ranked USING (layer, head) WHERE rank = 1"""


def head_decreases(stage: str, where: str, label: str) -> str:
    """Relative decrease, (original - ablated) / original, under each operation's most costly head."""
    return f"""WITH {_prompts(stage, where)},
own AS (
    SELECT layer || '.' || head AS unit, operation, count(*) AS n, sum(baseline_hits) / sum(n) AS original,
           (sum(fell) - sum(rose)) / sum(n) AS drop, [score_part(fell, rose, n)] AS parts,
           row_number() OVER (PARTITION BY operation ORDER BY round(drop, 12) DESC, layer, head) AS rank
    FROM counted GROUP BY layer, head, operation
)
SELECT '{label}' || operation AS what, unit, rank, drop / nullif(original, 0) AS value,
       score_bound(drop, parts, -1) / nullif(original, 0) AS low,
       least(score_bound(drop, parts, 1) / nullif(original, 0), 1) AS high, n
FROM own WHERE rank = 1 OR list_contains($units, unit)"""


def costly_heads(stage: str) -> str:
    """How many heads cost 10 points or more over all operations, 0.01 to 2 points, and how many there are.

    The first count's interval leaves out heads that surely cost less, and begins with those that surely cost as much:
    score tests of a drop of 10 points (docs/statistics.md), each at 5 % over the number of heads.
    """
    return f"""WITH own AS (
    SELECT layer, head, operation, count(*) AS n, (sum(fell) - sum(rose)) / sum(n) AS drop,
           score_part(fell, rose, n) AS part
    FROM ablated_prompts WHERE run_id = ${stage} AND node = 'head' GROUP BY layer, head, operation
),
whole AS (
    SELECT min(n) AS n, round(avg(drop), 12) AS drop, list(part ORDER BY operation) AS parts
    FROM own GROUP BY layer, head
),
tested AS (
    SELECT n, drop, erfc(abs(drop - 0.1) / sqrt(2 * score_variance(0.1, drop, parts))) * count(*) OVER () < 0.05 AS sure
    FROM whole
)
SELECT 'heads that cost 10 points or more' AS what, '' AS unit, 0 AS rank, count_if(drop >= 0.1) AS value,
       count_if(drop >= 0.1 AND sure) AS low, count_if(drop >= 0.1 OR NOT sure) AS high, min(n) AS n FROM tested
UNION ALL
SELECT 'heads that cost 0.01 to 2 points', '', 0, count_if(drop BETWEEN 0.0001 AND 0.02), NULL, NULL, min(n) FROM tested
UNION ALL
SELECT 'heads', '', 0, count(*), NULL, NULL, min(n) FROM tested"""


def carry_decreases(stage: str) -> str:
    """Relative decrease on memorize and change-one tokens under each operation's most costly head."""
    return f"""WITH first AS (
    SELECT layer, head, operation, layer || '.' || head AS unit,
           row_number() OVER (PARTITION BY operation ORDER BY round(drop, 12) DESC, layer, head) AS rank
    FROM head_effects WHERE run_id = ${stage} AND operation <> 'all'
),
tokens AS (
    SELECT s.layer, s.head, s.prompt_id, p.operation, b.correct AS was, s.correct AS is_now,
           CASE WHEN p.operation IN ('add', 'sub') THEN t.carry_class
                WHEN s.position = max(s.position) OVER (PARTITION BY s.layer, s.head, s.prompt_id) THEN 'memorize'
                ELSE 'change-one' END AS class
    FROM head_scan AS s
    JOIN baseline AS b USING (run_id, prompt_id, position)
    JOIN run_records AS r USING (run_id)
    JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
    JOIN answer_tokens AS t ON t.prompts_fingerprint = r.prompts_fingerprint AND t.prompt_id = s.prompt_id
                           AND t.position = s.position
    WHERE s.run_id = ${stage}
),
own AS (
    SELECT operation, class, unit, rank, count(*) AS n, sum(was) / sum(n) AS original,
           (sum(fell) - sum(rose)) / sum(n) AS drop, [score_part(fell, rose, n)] AS parts
    FROM (
        SELECT layer, head, operation, class, prompt_id, count(*) AS n, count_if(was) AS was,
               count_if(was AND NOT is_now) AS fell, count_if(is_now AND NOT was) AS rose
        FROM tokens WHERE class IN ('memorize', 'change-one') GROUP BY ALL
    )
    JOIN first USING (layer, head, operation)
    WHERE rank = 1 OR list_contains($units, unit)
    GROUP BY operation, class, unit, rank
)
SELECT class || ' ' || operation AS what, unit, rank, drop / nullif(original, 0) AS value,
       score_bound(drop, parts, -1) / nullif(original, 0) AS low,
       least(score_bound(drop, parts, 1) / nullif(original, 0), 1) AS high, n
FROM own"""


def mask_keep(stage: str, cases: str) -> str:
    """Relative decreases with the first k neurons masked, or all others; and of their coefficients."""
    return f"""WITH own AS (
    SELECT * REPLACE (fewest AS prompts)
    FROM (SELECT *, min(prompts) OVER (PARTITION BY k) AS fewest FROM paper_a_table5
          WHERE run_id = ${stage} AND cases = '{cases}' AND scoring = 'token')
    WHERE operation = 'all'
)
SELECT 'mask top' || k AS what, '' AS unit, 0 AS rank, mask AS value, mask_low AS low, mask_high AS high,
    prompts AS n FROM own
UNION ALL SELECT 'keep top' || k, '', 0, keep, keep_low, keep_high, prompts FROM own
UNION ALL SELECT 'coef top' || k, '', 0, coef, NULL, NULL, prompts FROM own
UNION ALL SELECT 'mask, random top' || k, '', 0, mask_random, NULL, NULL, prompts FROM own
UNION ALL SELECT 'keep, random top' || k, '', 0, keep_random, NULL, NULL, prompts FROM own"""


def root_zeroed(stage: str) -> str:
    """By how much coefficients fall when the lowest of the first k neurons is zeroed."""
    return f"""WITH own AS (
    SELECT *, min(n) OVER (PARTITION BY k) AS fewest FROM paper_a_table6 WHERE run_id = ${stage} AND cases = 'correct'
)
SELECT 'coef top' || k AS what, '' AS unit, 0 AS rank, root AS value, root_low AS low, root_high AS high, fewest AS n
FROM own WHERE operation = 'all'
UNION ALL
SELECT 'coef, random top' || k, '', 0, random, random_low, random_high, fewest FROM own WHERE operation = 'all'"""


def concepts_zeroed(stage: str) -> str:
    """Relative decrease with all neurons of a level zeroed, and with as many random ones."""
    fewest = f"(SELECT min(prompts) FROM accuracies WHERE run_id = ${stage})"
    return f"""SELECT 'accuracy M=' || level AS what, '' AS unit, 0 AS rank, decrease AS value, low, high, {fewest} AS n
FROM paper_a_table8 WHERE run_id = ${stage} AND operation = 'all'
UNION ALL
SELECT 'random M=' || level, '', 0, random, NULL, NULL, {fewest}
FROM paper_a_table8 WHERE run_id = ${stage} AND operation = 'all'"""


CONCEPT_COUNTS = """SELECT 'number M=' || level AS what, '' AS unit, 0 AS rank, kept AS value, kept AS low,
       kept AS high,
       NULL AS n
FROM concept_levels WHERE run_id = $concepts AND layer IS NULL AND level <= 3"""

CHAIN_NEURONS = """WITH own AS (
    SELECT name AS unit, place AS rank, importance, importance_zeroed, abs(coefficient) AS coefficient,
           abs(coefficient_zeroed) AS coefficient_zeroed
    FROM chain WHERE run_id = $chain AND stage = 'deep_neuron' AND (place <= 3 OR list_contains($units, name))
)
SELECT 'importance, original' AS what, unit, rank, importance AS value, importance AS low, importance AS high,
    NULL AS n FROM own
UNION ALL SELECT 'importance, intervened', unit, rank, importance_zeroed, importance_zeroed, importance_zeroed,
    NULL FROM own
UNION ALL SELECT 'coefficient, original', unit, rank, coefficient, coefficient, coefficient, NULL FROM own
UNION ALL SELECT 'coefficient, intervened', unit, rank, coefficient_zeroed, coefficient_zeroed, coefficient_zeroed,
    NULL FROM own"""

CHAIN_HEADS = """SELECT 'p(answer)' AS what, name AS unit, place AS rank, probability_zeroed AS value,
       probability_zeroed AS low, probability_zeroed AS high, NULL AS n
FROM chain WHERE run_id = $chain AND stage = 'head' AND (place <= 6 OR list_contains($units, name))
UNION ALL
SELECT 'p(answer)', 'original', 0, probability, probability, probability, NULL
FROM chain WHERE run_id = $chain AND stage = 'head' AND place = 1"""


def knocked_out(stage: str, where: str = "operation = 'all'") -> str:
    """Accuracy with k heads out: the ranking's, and random ones (mean over draws)."""
    return f"""SELECT 'key heads, k=' || k AS what, '' AS unit, 0 AS rank, accuracy AS value, low, high,
       (SELECT min(prompts) FROM accuracies WHERE run_id = ${stage} AND operation <> 'all') AS n
FROM knockout_curve WHERE run_id = ${stage} AND ranking = 'effect' AND {where}
UNION ALL
SELECT 'random heads, k=' || k, '', 0, accuracy, NULL, NULL, NULL
FROM knockout_bands WHERE run_id = ${stage} AND ranking = 'random' AND {where}"""
