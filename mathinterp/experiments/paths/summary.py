"""What a finished path scan says: key heads, how few, and whether measures agree (paper B, section 4.1)."""

from collections.abc import Mapping, Sequence

from mathinterp.experiments.paths import ShownNodes
from mathinterp.experiments.reach import noise_warnings, rough_warnings
from mathinterp.experiments.results import Results, Row, Shown, Summary, per_operation
from mathinterp.experiments.stability import stability_lines

TRUSTED_AGREEMENT = 0.5  # rank correlation of raw logit effects and log-probability changes under which to warn
MEASURES = {
    "logit": "% of the logit",
    "centred": "% of the centred logit",
    "probability": "points of probability",
    "logprob": "hundredths of a nat",
}  # unit of 100 * effect
DIFFERENCES = "Largest losses of the logit difference, answer minus distractor (95 % interval)"
SHARES = ("answered right", "logit lower on X_c", "logprob lower")  # of the pairs


def summarize(results: Results, shown: ShownNodes) -> Summary:
    """Pairs, the first nodes of most negative effect per operation, key heads, and the agreement of measures."""
    effects = results.rows(
        """SELECT operation, node = 'head' AS is_head, rank, below, sure, key, q_value AS q, logprob_change,
               CASE node WHEN 'head' THEN layer || '.' || head ELSE 'mlp ' || layer END AS node,
               mean AS effect, low, high
           FROM path_effects WHERE run_id = $run ORDER BY operation = 'all' DESC, operation, rank"""
    )
    columns = ("operation", "node", "effect", "low", "high", "q", "below", "sure", "key", "logprob_change")
    ranked = [{name: row[name] for name in columns} for row in effects if row["rank"] <= shown.top]
    differences = _differences(results, shown.top)
    unit = dict.fromkeys(("effect", "low", "high"), "")
    key_heads: dict[str, list[str]] = {row["operation"]: [] for row in effects}
    for row in effects:
        if row["is_head"] and row["key"]:
            key_heads[row["operation"]].append(row["node"])
    agreement = _agreement(results)
    pairs, verdict = _pairs(results), _verdict(effects, key_heads)
    warnings = _warnings(results, agreement, pairs)
    stable = stability_lines(results)
    return Summary(
        parts=[
            Shown("Pairs", pairs, dict.fromkeys(SHARES, "%")),
            Shown(f"Most negative effects of one node ({_measure(results)})", per_operation(ranked), unit),
            *([Shown(DIFFERENCES, per_operation(differences))] if differences else []),
            verdict,
            *stable,
            Shown("Do measures rank the nodes alike? (rank correlations)", per_operation(agreement)),
        ],
        data={
            "pairs": pairs, "top": ranked, "key_heads": key_heads, "agreement": agreement, "verdict": verdict,
            "stability": stable, "warnings": warnings, **({"logit_differences": differences} if differences else {}),
        },
        queries=[
            results.query(
                "SELECT * FROM path_effects WHERE run_id = $run AND operation = 'all' ORDER BY rank LIMIT 10"
            ),
            *(
                [results.query("SELECT * FROM path_pairs WHERE run_id = $run AND NOT kept LIMIT 10")]
                if any(row["kept"] < row["pairs"] for row in pairs)
                else []
            ),
            results.query("SELECT * FROM path_agreement WHERE run_id = $run"),
        ],
        warnings=warnings,
    )  # fmt: skip


def _differences(results: Results, top: int) -> list[Row]:
    """The nodes of each operation whose patching favours the distractors most; none where pairs have no distractor."""
    return results.rows(
        """SELECT operation, CASE node WHEN 'head' THEN layer || '.' || head ELSE 'mlp ' || layer END AS node, n,
               baseline, patched, change, change_low AS low, change_high AS high
           FROM path_logit_differences WHERE run_id = $run
           QUALIFY row_number() OVER (PARTITION BY operation ORDER BY change, layer, head NULLS LAST) <= $top
           ORDER BY operation = 'all' DESC, operation, change, layer, head NULLS LAST""",
        top=top,
    )


def _pairs(results: Results) -> list[Row]:
    """Per operation, pairs given and kept, and on how many of them X_c lowers the gold logit and log-probability."""
    return results.rows(
        """SELECT coalesce(p.operation, 'none') AS operation, count(*) AS pairs, count_if(kept)::BIGINT AS kept,
               avg(correct::INTEGER) AS "answered right",
               avg((logit_counterfactual < logit_original)::INTEGER) FILTER (kept) AS "logit lower on X_c",
               avg((logprob_counterfactual < logprob_original)::INTEGER) FILTER (kept) AS "logprob lower"
           FROM path_pairs AS s JOIN runs AS r USING (run_id)
           LEFT JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
           WHERE s.run_id = $run GROUP BY ALL ORDER BY operation"""
    )


def _measure(results: Results) -> str:
    """The unit of 100 * ``effect``, in words."""
    (run,) = results.rows("SELECT parameters ->> 'effect' AS effect FROM runs WHERE run_id = $run")
    return MEASURES[run["effect"]]


def _verdict(effects: Sequence[Row], key_heads: Mapping[str, Sequence[str]]) -> str:
    """How few heads are key heads, and how many of them surely."""
    heads = [row for row in effects if row["is_head"] and row["operation"] == "all"]
    if not heads:
        return "No head was patched."
    found = key_heads["all"]
    unsure = sum(row["below"] and not row["sure"] for row in heads)
    by_operation = ", ".join(f"{name} {len(keys)}" for name, keys in key_heads.items() if name != "all")
    first = ", ".join(found[:10]) + (", ..." if found[10:] else "")
    named = f" ({first})" if found else ""
    more = f" {unsure} more are below -5 % but not sure." if unsure else ""
    return (
        f"{len(found)} of {len(heads)} heads ({100 * len(found) / len(heads):.1f} %) are key heads, with an effect"
        f" surely below 0 and under -5 % over all operations{named}; by operation: {by_operation}.{more}"
    )


def doubts(results: Results) -> list[str]:
    """What makes the effects doubtful."""
    return _warnings(results, _agreement(results), _pairs(results))


def _agreement(results: Results) -> list[Row]:
    """Whether measures rank the nodes alike."""
    return results.rows(
        """SELECT operation, nodes, logit_logprob, first_order_rank, first_order_pearson FROM path_agreement
           WHERE run_id = $run ORDER BY operation = 'all' DESC, operation"""
    )


def _warnings(results: Results, agreement: Sequence[Row], pairs: Sequence[Row]) -> list[str]:
    kept = [{"operation": row["operation"], "prompts": row["kept"]} for row in pairs]
    return [*_unlike(agreement), *noise_warnings(results), *rough_warnings(kept)]


def _unlike(agreement: Sequence[Row]) -> list[str]:
    return [
        f"operation {row['operation']}: raw logit effects and log-probability changes rank the nodes differently"
        f" (rank correlation {row['logit_logprob']:.2f}, under {TRUSTED_AGREEMENT}): raw logits can move by a constant"
        " that no prediction sees; look at `effect` centred or logprob too"
        for row in agreement
        if row["logit_logprob"] is not None and row["logit_logprob"] < TRUSTED_AGREEMENT
    ]
