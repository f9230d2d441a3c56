"""Scores of nodes from finished runs of any kind that has them: what circuits are ranked by, and methods compared on.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import finished_run

if TYPE_CHECKING:
    import pandas as pd

    from mathinterp.store import Store

MASK_SIZE = (
    "greatest(log_alpha::DOUBLE, 0) + ln(1 + exp(-abs(log_alpha::DOUBLE)))"  # ordered as ``open``, which rounds to 1
)
ABLATED = """SELECT '{node}' AS node, s.layer, {unit} AS unit, avg(s.logit_difference - b.logit_difference) AS score
    FROM {node}_scan_logit_differences AS s JOIN baseline_logit_differences AS b USING (run_id, prompt_id, position)
    WHERE run_id = $run AND position = 0 GROUP BY ALL"""
SCORES = {
    "attribution": """SELECT node, layer, coalesce(head, neuron)::INTEGER AS unit, avg(effect::DOUBLE) AS score
        FROM node_attributions WHERE run_id = $run GROUP BY ALL""",
    "heads": ABLATED.format(node="head", unit="s.head::INTEGER"),
    "mlps": ABLATED.format(node="mlp", unit="NULL::INTEGER"),
    "mask": f"SELECT node, layer, head::INTEGER AS unit, -({MASK_SIZE}) AS score FROM mask_scores WHERE run_id = $run",
    "paths": """SELECT s.node, s.layer, s.head::INTEGER AS unit,
            avg((s.logit_patched::DOUBLE - d.logit_patched) - (s.logit_original::DOUBLE - d.logit_original)) AS score
        FROM path_scan AS s JOIN path_distractors AS d ON d.run_id = s.run_id AND d.node = s.node
            AND d.layer = s.layer AND d.head IS NOT DISTINCT FROM s.head AND d.prompt_id = s.prompt_id
        WHERE s.run_id = $run GROUP BY ALL""",
}  # scan -> SQL with the parameter $run: node, layer, unit, score
EFFECTS = ("logit_difference", "logprob")
CHANGED = """SELECT '{node}' AS node, s.layer, {unit} AS unit, avg(s.logprob::DOUBLE - b.logprob) AS score
    FROM {node}_scan AS s JOIN baseline AS b USING (run_id, prompt_id, position)
    WHERE run_id = $run GROUP BY ALL"""
LOGPROBS = {
    "heads": CHANGED.format(node="head", unit="s.head::INTEGER"),
    "mlps": CHANGED.format(node="mlp", unit="NULL::INTEGER"),
    "paths": """SELECT node, layer, head::INTEGER AS unit, avg(logprob_change::DOUBLE) AS score FROM path_scan
        WHERE run_id = $run GROUP BY ALL""",
}  # the same with the change of the answer's log-probability, which needs no distractors


def node_scores(store: Store, run_id: str, effect: str = "logit_difference") -> pd.DataFrame:
    """Mean effect of every node of a run on the logit difference (D, over prompts), as the run's method has it.

    Args:
        run_id: a finished run of attribution, mask, heads, mlps or paths.
        effect: "logprob": on the log-probability of the answer's tokens, of a run of heads, mlps or paths.
    Returns:
        node ("head", "mlp" or "neuron"), layer, unit (head or neuron; null for an MLP) and score: the change of
        logit(answer) - logit(distractor) under the node's replacement. Below 0: the node speaks for the answer. A mask
        knows no signs: its score is -ln(1 + exp(log_alpha)), ordered as the probability that the node stays open.
    Raises:
        UserError: there is no such run, it has no such scores, or its prompts have no distractors.
    """
    if effect not in EFFECTS:
        raise UserError(f"`effect` '{effect}' is not known; take one of {', '.join(EFFECTS)}")
    known = SCORES if effect == "logit_difference" else LOGPROBS
    scan = finished_run(store, run_id, f"nodes by {effect}" if known is LOGPROBS else "nodes", known)["scan"]
    found = store.dataframe(f"SELECT * FROM ({known[scan]}) ORDER BY node, layer, unit", {"run": run_id})
    if found.empty:
        raise UserError(f"run {run_id}: its prompts have no distractors, so it has no logit differences to rank by")
    return found
