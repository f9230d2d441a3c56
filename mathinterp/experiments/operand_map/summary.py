"""What finished operand maps say: how many neurons each heuristic explains, the best units, and what few neurons do."""

from mathinterp.experiments.operand_map import ShownUnits
from mathinterp.experiments.results import Results, Row, Shown, Summary

EXPLAINED = 0.9  # AUROC from which a unit counts as explained in words
IN_WORDS = {
    **{
        f"{of}_{kind}": f"{'the result' if of == 'result' else of} {said}"
        for of in ("a", "b", "result")
        for kind, said in (
            ("mod_2", "modulo 2"),
            ("mod_5", "modulo 5"),
            ("mod_10", "modulo 10"),
            ("tens", "by its tens digit"),
            ("range", "in a range"),
        )
    },
    "carry": "a carry or borrow",
    "equal": "a = b",
}


def summarize(results: Results, shown: ShownUnits) -> Summary:
    """Neurons by family, the ``top`` neurons and heads, and the first answer token with few neurons kept."""
    families = results.rows(
        f"""SELECT family, count(*) AS neurons, count_if(auroc >= {EXPLAINED}) AS explained, avg(auroc) AS auroc,
                  avg(shuffled) AS shuffled
           FROM operand_units WHERE run_id = $run AND node = 'neuron' AND family IS NOT NULL
           GROUP BY family ORDER BY explained DESC, neurons DESC, family"""
    )
    units = {node: _best(results, node, shown.top) for node in ("neuron", "head")}
    kept = results.rows(
        """SELECT ablation, ranking, k, n, accuracy, baseline_accuracy, drop, drop_low, drop_high, faithfulness
           FROM operand_faithfulness WHERE run_id = $run ORDER BY ranking DESC, k DESC"""
    )
    words = [*_explained(families), *shorter_sentences(results), *_kept(kept)] if results.finished else []
    return Summary(
        parts=[
            Shown(f"Neurons by the family of their best heuristic; explained: AUROC {EXPLAINED} or more", families),
            Shown("Neurons that one heuristic explains best", units["neuron"], {"explained": "%"}),
            Shown("Heads that one heuristic explains best", units["head"], {"explained": "%"}),
            Shown(
                "First answer token with k neurons of each deep layer kept at END", kept,
                dict.fromkeys(("accuracy", "baseline_accuracy"), "%") | dict.fromkeys(
                    ("drop", "drop_low", "drop_high"), "points"),
            ),
            " ".join(words),
        ],
        data={"families": families, "neurons": units["neuron"], "heads": units["head"], "kept": kept, "words": words},
        queries=[
            results.query("SELECT * FROM operand_units WHERE run_id = $run ORDER BY auroc DESC LIMIT 10"),
            results.query(
                "SELECT a, b, value FROM operand_maps WHERE run_id = $run AND node = 'head' AND layer = 0 AND head = 0"
                " AND measure = 'norm' LIMIT 10"
            ),
        ],
    )  # fmt: skip


def _best(results: Results, node: str, top: int) -> list[Row]:
    return results.rows(
        """SELECT unit, measure, heuristic, CASE WHEN high THEN 'high' ELSE 'low' END AS there, auroc, shuffled,
                  explained, power_2, power_5, power_10, power_100, direct, effect
           FROM operand_units WHERE run_id = $run AND node = $node AND auroc IS NOT NULL
           ORDER BY auroc DESC, layer, coalesce(head, neuron), measure LIMIT $top""",
        node=node,
        top=top,
    )


def _explained(families: list[Row]) -> list[str]:
    """How many neurons are explained, by what, and what chance explains."""
    neurons = sum(row["neurons"] for row in families)
    explained = sum(row["explained"] for row in families)
    if not neurons:
        return ["No neuron varies over the pairs."]
    shuffled = sum(row["shuffled"] * row["neurons"] for row in families) / neurons
    most = [f"{IN_WORDS[row['family']]} ({row['explained']})" for row in families[:3] if row["explained"]]
    return [
        f"Of {neurons} neurons one heuristic tells {explained} apart with an AUROC of {EXPLAINED} or more"
        + (f", most often {_listed(most)};" if most else ";")
        + f" with the pairs shuffled the best heuristic has {shuffled:.2f} on average."
    ]


def shorter_sentences(results: Results) -> list[str]:
    """A caution where sentences with an operand below 10 are shorter than all others with the same other operand."""
    names = [name for name, other in (("a", "b"), ("b", "a")) if _shorter(results, name, other)]
    if not names:
        return []
    tens = " and ".join(f"'tens digit of {name} = 0'" for name in names)
    are = "are also shorter sentences" if len(names) > 1 else "is also a shorter sentence"
    return [f"Sentences differ in their number of tokens: {tens} {are}."]


def _shorter(results: Results, name: str, other: str) -> bool:
    (row,) = results.rows(
        f"""SELECT coalesce(bool_and(few < many), false) AS shorter FROM (
               SELECT max(tokens) FILTER ({name} < 10) AS few, min(tokens) FILTER ({name} >= 10) AS many
               FROM operand_pairs WHERE run_id = $run GROUP BY {other})"""
    )
    return bool(row["shorter"])


def _kept(kept: list[Row]) -> list[str]:
    """What the most kept neurons do, beside random ones and none."""
    found = {(row["ranking"], row["k"]): row for row in kept}
    k = max((row["k"] for row in kept), default=0)
    if not k:
        return []
    top, chance, none = found["top", k], found["random", k], found["top", 0]
    others = "at their mean" if top["ablation"] == "mean" else "at zero"
    return [
        f"With the {k} neurons of largest effect kept in each deep layer at END and the others {others}, the first"
        f" answer token is right in {100 * top['accuracy']:.4g} % of the pairs (whole model"
        f" {100 * top['baseline_accuracy']:.4g} %, {k} random ones {100 * chance['accuracy']:.4g} %, none"
        f" {100 * none['accuracy']:.4g} %)."
    ]


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
