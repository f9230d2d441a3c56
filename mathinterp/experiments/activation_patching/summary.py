"""What a finished run of activation patching says: at which tokens and layers the answer is decided."""

from collections.abc import Sequence
from itertools import groupby, takewhile

from mathinterp.experiments.activation_patching import ShownPatches
from mathinterp.experiments.reach import rough_warnings
from mathinterp.experiments.results import Results, Row, Shown, Summary

EFFECTS = "patching_effects WHERE run_id = $run AND operation = 'all' AND measure = $measure"


def summarize(results: Results, shown: ShownPatches) -> Summary:
    """The places of largest effect, site by site in both directions, and from which layer on END decides."""
    measure = shown.measure
    pairs = results.rows(
        """SELECT count(*) AS pairs, count_if(kept) AS kept, 100 * avg(correct::INTEGER) AS "answered right (%)",
               avg(logprob_original) FILTER (kept) AS logprob, avg(logprob_counterfactual) FILTER (kept)
               AS "logprob on X_c" FROM patching_pairs WHERE run_id = $run"""
    )
    places = _places(results, shown)
    decides = results.rows(
        f"""SELECT direction, layer, token_type FROM {EFFECTS} AND site = 'residual'
            QUALIFY row_number() OVER (PARTITION BY direction, layer ORDER BY fraction DESC NULLS LAST, token_type) = 1
            ORDER BY direction, layer DESC""",
        measure=measure,
    )
    arrives = _end_from(decides)
    when = {name: "never" if layer is None else f"from layer {layer} on" for name, layer in arrives.items()}
    verdict = "; ".join(f"{direction}: {layers}" for direction, layers in when.items())
    if arrives:
        verdict = f"Of the residual streams that enter a layer, END's decides most ({verdict})."
    return Summary(
        parts=[
            Shown("Pairs", pairs),
            Shown(f"Largest fractions of the gap in {measure} that one token of a kind closes, 95 % interval", places),
            verdict,
        ],
        data={"pairs": pairs, "places": places, "end_decides_from": arrives, "measure": measure, "verdict": verdict},
        queries=[
            results.query(
                "SELECT * FROM patching_effects WHERE run_id = $run AND operation = 'all' AND measure = 'logprob'"
                " ORDER BY site, direction, layer, token_type"
            ),
            results.query("SELECT * FROM patching_pairs WHERE run_id = $run AND NOT kept LIMIT 10"),
        ],
        warnings=_warnings(results, places),
    )


def _places(results: Results, shown: ShownPatches) -> list[Row]:
    """The places of largest effect of each site and direction."""
    return results.rows(
        f"""SELECT site, direction, layer, token_type, fraction, fraction_low AS low, fraction_high AS high, change, n
            FROM {EFFECTS} QUALIFY row_number() OVER (PARTITION BY site, direction
                ORDER BY fraction DESC NULLS LAST, layer, token_type) <= {shown.top}
            ORDER BY site DESC, direction, fraction DESC NULLS LAST, layer, token_type""",
        measure=shown.measure,
    )


def doubts(results: Results, shown: ShownPatches) -> list[str]:
    """What makes the fractions doubtful."""
    return _warnings(results, _places(results, shown))


def _warnings(results: Results, places: Sequence[Row]) -> list[str]:
    kept = results.rows(
        """SELECT coalesce(operation, 'none') AS operation, count(DISTINCT prompt_id) AS prompts
           FROM patching_prompts WHERE run_id = $run GROUP BY ALL ORDER BY ALL"""
    )
    unsure = (
        "Some fractions have no interval: the pairs' two sentences do not surely differ in the score, or there are too"
        " few pairs; give more prompts (`limit`)"
    )
    return [*rough_warnings(kept), *([unsure] if any(row["low"] is None for row in places) else [])]


def _end_from(decides: Sequence[Row]) -> dict[str, int | None]:
    """Direction -> the first layer from which on END's residual stream matters most, given the layers from the last."""
    arrives: dict[str, int | None] = {}
    for direction, rows in groupby(decides, key=lambda row: row["direction"]):
        settled = takewhile(lambda row: row["token_type"] == "end", rows)
        arrives[direction] = min((row["layer"] for row in settled), default=None)
    return arrives
