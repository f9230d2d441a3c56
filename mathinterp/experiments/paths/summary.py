"""What a finished path scan says, from the stored rows alone: key heads, how few, and whether measures agree.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from dataclasses import dataclass
from typing import Any

from mathinterp.store import Store

TRUSTED_AGREEMENT = 0.5  # rank correlation of raw logit effects and log-probability changes under which to warn


@dataclass(frozen=True)
class PathSummary:
    """The answer of a path scan.

    pairs: per operation, pairs given and kept, and on how many of them X_c lowers the gold logit and log-probability.
    top: per operation, the nodes of most negative effect (rows of path_effects).
    key_heads: operation -> its heads with an effect below -5 %, most negative first.
    agreement: rows of path_agreement.
    """

    pairs: list[dict[str, Any]]
    top: list[dict[str, Any]]
    key_heads: dict[str, list[str]]
    agreement: list[dict[str, Any]]
    verdict: str
    warnings: list[str]
    queries: list[str]

    def as_json(self) -> dict[str, Any]:
        """What the command prints under --json."""
        names = ("pairs", "top", "key_heads", "agreement", "verdict", "warnings")
        return {name: getattr(self, name) for name in names}


def summarize_paths(store: Store, run_id: str, top: int = 10) -> PathSummary:
    """Summarize a path scan; ``top`` nodes are shown per operation."""
    connection = store.connect("path_effects", "path_pairs", "path_agreement", "runs", "prompts")

    def rows(sql: str) -> list[dict[str, Any]]:
        return connection.sql(sql).to_arrow_table().to_pylist()

    connection.execute(
        "CREATE TEMP TABLE effects AS"
        " SELECT *, CASE node WHEN 'head' THEN layer || '.' || head ELSE 'mlp ' || layer END AS name"
        f" FROM path_effects WHERE run_id = '{run_id}'"
    )
    ranked = rows(
        f"""SELECT operation, name AS node, 100 * mean AS "effect", 100 * low AS "low", 100 * high AS "high",
               q_value AS q, key, logprob_change
            FROM effects WHERE rank <= {top} ORDER BY operation = 'all' DESC, operation, rank"""
    )
    key_heads: dict[str, list[str]] = {row["operation"]: [] for row in ranked}
    for row in rows("SELECT operation, name FROM effects WHERE key AND node = 'head' ORDER BY operation, rank"):
        key_heads[row["operation"]].append(row["name"])
    agreement = rows(
        f"""SELECT operation, nodes, logit_logprob, first_order_rank, first_order_pearson FROM path_agreement
            WHERE run_id = '{run_id}' ORDER BY operation = 'all' DESC, operation"""
    )
    heads = rows("SELECT count(*) AS n FROM effects WHERE operation = 'all' AND node = 'head'")[0]["n"]
    sure = rows(
        "SELECT count(*) AS n FROM effects WHERE operation = 'all' AND node = 'head' AND key AND q_value < 0.05"
    )
    return PathSummary(
        pairs=_pairs(rows, run_id),
        top=ranked,
        key_heads=key_heads,
        agreement=agreement,
        verdict=_verdict(key_heads, heads, sure[0]["n"]),
        warnings=_warnings(agreement),
        queries=[
            f"SELECT * FROM path_effects WHERE run_id = '{run_id}' AND operation = 'all' ORDER BY rank LIMIT 10",
            f"SELECT * FROM path_pairs WHERE run_id = '{run_id}' AND NOT kept LIMIT 10",
            f"SELECT * FROM path_agreement WHERE run_id = '{run_id}'",
        ],
    )


def _pairs(rows: Any, run_id: str) -> list[dict[str, Any]]:
    return rows(
        f"""SELECT coalesce(p.operation, 'none') AS operation, count(*) AS pairs, count_if(kept)::BIGINT AS kept,
               100 * avg(correct::INTEGER) AS "answered right (%)",
               100 * avg((logit_counterfactual < logit_original)::INTEGER) FILTER (kept) AS "logit lower on X_c (%)",
               100 * avg((logprob_counterfactual < logprob_original)::INTEGER) FILTER (kept) AS "logprob lower (%)"
            FROM path_pairs AS s JOIN runs AS r USING (run_id)
            LEFT JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
            WHERE s.run_id = '{run_id}' GROUP BY ALL ORDER BY operation"""
    )


def _verdict(key_heads: dict[str, list[str]], heads: int, sure: int) -> str:
    if not heads:
        return "No head was patched."
    found = key_heads.get("all", [])
    others = {operation: names for operation, names in key_heads.items() if operation != "all"}
    by_operation = ", ".join(f"{operation} {len(names)}" for operation, names in others.items())
    named = f" ({', '.join(found[:10])}{', ...' if len(found) > 10 else ''}; {sure} with q < 0.05)" if found else ""
    return (
        f"{len(found)} of {heads} heads ({100 * len(found) / heads:.1f} %) are key heads, with an effect below -5 %"
        f" over all operations{named}; by operation: {by_operation}."
    )


def _warnings(agreement: list[dict[str, Any]]) -> list[str]:
    return [
        f"operation {row['operation']}: raw logit effects and log-probability changes rank the nodes differently"
        f" (rank correlation {row['logit_logprob']:.2f}, under {TRUSTED_AGREEMENT}): raw logits can move by a constant"
        " that no prediction sees; look at --effect centred or logprob too"
        for row in agreement
        if row["logit_logprob"] is not None and row["logit_logprob"] < TRUSTED_AGREEMENT
    ]
