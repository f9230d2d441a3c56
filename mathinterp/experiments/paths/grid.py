"""Every patched node on every pair: what became of the answer's first digit. For pages that show every cell."""

import numpy as np

from mathinterp.experiments.adaptive.summary import decided
from mathinterp.experiments.grid import (
    MISSING,
    RIGHT_AFTER,
    RIGHT_BEFORE,
    Grid,
    Outcomes,
    Places,
    Quantity,
    attention_of,
    decisions_of,
    token_words,
    written,
)
from mathinterp.experiments.paths.figure import UNITS
from mathinterp.experiments.results import Results

STRONG = 0.05  # as ``below`` in path_effects
CELLS = "SELECT layer, head, prompt_id, effect, logprob_change AS change FROM path_scan WHERE run_id = $run"
PAIRS = """SELECT s.prompt_id, p.text, p.answer, coalesce(p.operation, 'none') AS operation, s.predicted_id,
                  p.counterfactual, s.logprob_original AS logprob
           FROM path_pairs AS s JOIN run_records AS r USING (run_id)
           JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
           WHERE run_id = $run AND s.prompt_id IN (SELECT prompt_id FROM path_scan WHERE run_id = $run)
           ORDER BY operation, s.prompt_id"""


def grid(results: Results) -> Grid | None:
    """Heads and MLPs by pairs: of an adaptive scan, the cells that were computed. None: it has none yet.

    A cell is worse where the effect is under -5 % (in the run's measure), better where it is above 5 %.
    """
    found = results.frame(CELLS)
    if found.empty:
        return None
    (run,) = results.rows("SELECT parameters ->> 'effect' AS effect FROM runs WHERE run_id = $run")
    title, unit = UNITS[run["effect"]]
    decides, pairs, words = decided(results), results.rows(PAIRS), token_words(results)
    places = Places(found, pairs)
    effect, change = (places.filled(found, found[name]) for name in ("effect", "change"))
    cells = np.select(
        [np.isnan(effect), effect < -STRONG, effect > STRONG],
        [MISSING, RIGHT_BEFORE, RIGHT_AFTER], RIGHT_BEFORE | RIGHT_AFTER,
    ).astype(np.uint8)  # fmt: skip
    logprob = Quantity("change of log-probability", "nats", change)
    return Grid(
        word="node",
        layers=places.layers,
        heads=places.heads,
        prompts=[{**pair, "predicted": written([pair["predicted_id"]], words)} for pair in pairs],
        extras=("counterfactual",),
        cells=cells,
        outcomes=_outcomes(title, unit, decides),
        quantities=[logprob] if run["effect"] == "logprob" else [Quantity(title, unit, effect), logprob],
        by_quantity=True,
        logprobs=np.array([pair["logprob"] for pair in pairs]),
        attention=attention_of(results, places, cells, effect),
        decisions=decisions_of(results, places, unit) if decides else None,
    )


def _outcomes(title: str, unit: str, decides: bool) -> Outcomes:
    clipped = " A decision counts each effect as no more than 1 (100 %) on either side." if decides else ""
    bar = {"%": "5 %", "points": "5 points"}.get(unit, f"{STRONG} {unit}")
    return Outcomes(
        ("lower", "lowered"), ("raise", "raised"),
        (f"lowered by more than {bar}", f"raised by more than {bar}", "", f"within {bar}"),
        f"Of the answer's first digit: the {title}, with the node's output on the counterfactual sentence; lowered and"
        f" raised are those of more than {bar}. Which digit the model would then predict, path scans do not"
        f" store.{clipped}",
    )  # fmt: skip
