"""What a finished evaluation of circuits says: faithfulness by share of nodes, CPR and CMD."""

from mathinterp.experiments.results import Results, Row, Shown, Summary


def summarize(results: Results) -> Summary:
    """Both curves, and the areas."""
    curve = results.rows(
        """SELECT fraction, any_value(nodes) AS nodes, max(faithfulness) FILTER (ordering = 'signed') AS signed,
                  max(low) FILTER (ordering = 'signed') AS signed_low,
                  max(high) FILTER (ordering = 'signed') AS signed_high,
                  max(faithfulness) FILTER (ordering = 'absolute') AS absolute,
                  max(low) FILTER (ordering = 'absolute') AS absolute_low,
                  max(high) FILTER (ordering = 'absolute') AS absolute_high
           FROM circuit_curves WHERE run_id = $run GROUP BY fraction ORDER BY fraction"""
    )
    scores, warnings = _scores(results), doubts(results)
    areas = f"CPR {_with_ends(scores, 'cpr')}, CMD {_with_ends(scores, 'cmd')}"
    return Summary(
        parts=[
            Shown(f"Faithfulness of the first nodes by {scores['method']} (95 % interval)", curve),
            f"{areas}: areas under f of the signed and |1 - f| of the absolute ranking, over {scores['n']} prompts;"
            f" shares are of {scores['scored']} scored nodes, what has no score always computes. m:"
            f" {scores['whole']:.3g} of the whole model, {scores['nothing']:.3g} of nothing ({scores['ablation']}).",
        ],
        data={"curve": curve, **scores, "warnings": warnings},
        queries=[
            results.query("SELECT * FROM circuit_curves WHERE run_id = $run ORDER BY ordering, fraction"),
            results.query("SELECT * FROM circuit_scores WHERE run_id = $run"),
        ],
        warnings=warnings,
    )


def _with_ends(scores: dict[str, float | None], name: str) -> str:
    low, high = scores[f"{name}_low"], scores[f"{name}_high"]
    if scores[name] is None:
        return "not defined"
    return f"{scores[name]:.3f}" + ("" if low is None or high is None else f" ({low:.3f} to {high:.3f})")


def _scores(results: Results) -> Row:
    (scores,) = results.rows(
        "SELECT * EXCLUDE (run_id, prompts_fingerprint, model, status) FROM circuit_scores WHERE run_id = $run"
    )
    return scores


def doubts(results: Results) -> list[str]:
    """A line if the whole model does not surely differ from nothing."""
    scores = _scores(results)
    if scores["cpr_low"] is not None:
        return []
    return [
        f"m is {scores['whole']:.3g} of the whole model and {scores['nothing']:.3g} of nothing, mean over {scores['n']}"
        " prompts: these do not differ surely, so faithfulness may be anything; take more prompts"
    ]
