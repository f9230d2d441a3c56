"""Paper B: what it measures, section by section (arXiv 2409.01659).

Its text was not at hand when this was written: numbers are second hand, as each item's source says, and figures whose
number is not known here go by their section.
"""

from mathinterp.workflows.papers.item import PROJECT_NOTES, READERS_NOTES, Cell, Item, grid
from mathinterp.workflows.papers.queries import knocked_out

LLAMA_2, LARGER = "Llama-2-7B", "Llama-2-13B"
PICTURE = "a figure, given only as a picture"
NOT_BUILT = "no experiment here measures it"
TRAININGS = "takes a training and two benchmarks for each row; `mathinterp tune precise` and `evaluate` make them"
OUR_TRAINING = tuple((name, "what the paper trained on is not published") for name in ("full ", "precise "))
TASKS = "gsm8k addsub singleeq svamp mmlu commonsense_qa"
# The model itself is the base, with its adapter if it has one. Whole benchmarks go before parts, then the newest.
BENCHMARKS = """SELECT method || ' ' || task AS what, '' AS unit, 0 AS rank, accuracy AS value, low, high, n
FROM (SELECT * REPLACE (CASE WHEN model_fingerprint = $fingerprint THEN 'base' ELSE method END AS method)
      FROM evaluation_results WHERE newest AND $fingerprint IN (model_fingerprint, base_fingerprint))
WHERE task IN ('gsm8k', 'addsub', 'singleeq', 'svamp', 'mmlu', 'commonsense_qa')
QUALIFY row_number() OVER (PARTITION BY method, task ORDER BY setting, started_at DESC, run_id) = 1"""
TRANSFER = "; where a set has no counterfactuals heads are zeroed, else they have their mean"


def _transfer(name: str, what: str, note: str = "the same heads, other sentences") -> Item:
    return Item(
        f"b-transfer-{name.replace('_', '-')}", "B", "Figures 4 and 5, section 4.1",
        f"accuracy with the key heads of `pairs` out, on {what}", LLAMA_2, knocked_out(f"knockout_{name}"),
        note=note + TRANSFER, baseline="loss", why=PICTURE,
    )  # fmt: skip


PAPER_B: tuple[Item, ...] = (
    Item(
        "b-paths-heads", "B", "section 4.1, the map of path effects",
        "path patching: the heads whose counterfactual output"
        " costs the answer's logit most", LLAMA_2,
        """WITH own AS (SELECT *, layer || '.' || head AS unit, row_number() OVER (ORDER BY mean, layer, head) AS place
                        FROM path_effects WHERE run_id = $paths AND node = 'head' AND operation = 'all')
           SELECT 'effect on the logit' AS what, unit, place AS rank, mean AS value, low, high, pairs AS n
           FROM own WHERE place <= 5 OR list_contains($units, unit)
           UNION ALL
           SELECT 'share of heads below -5 %, sure', '', 0, avg(key::INTEGER), NULL, NULL, min(pairs) FROM own""",
        (Cell("effect on the logit", "-14", "12.22", 1),), READERS_NOTES,
        note="the paper says that fewer than 5 % of heads are key, mostly in layers 12 to 17 (13.11, 14.2)",
    ),
    Item(
        "b-paths-mlps", "B", "section 4.1, the map of path effects", "path patching of whole MLPs, by layer", LLAMA_2,
        """SELECT 'MLP of layer ' || layer AS what, '' AS unit, 0 AS rank, mean AS value, low, high, pairs AS n
           FROM path_effects WHERE run_id = $paths AND node = 'mlp' AND operation = 'all' ORDER BY layer""",
        why=PICTURE, note="the paper says that MLPs matter from layer 17 of 32 on",
    ),
    Item(
        "b-knockout", "B", "section 4.1", "accuracy with the first k heads by path effect out, and with random ones",
        LLAMA_2, knocked_out("knockout"),
        (Cell("key heads, k=0", "100"), Cell("key heads, k=10", "30.2"), Cell("random heads, k=10", "98.0")),
        READERS_NOTES,
        note="the paper keeps prompts that the model answers rightly: its 100 % is by choice", baseline="loss",
    ),
    Item(
        "b-figure4-tokens", "B", "Figure 4, section 4.1", "the likeliest next tokens with more and more heads out",
        LLAMA_2,
        why="words, not numbers", note="`mathinterp knockout` shows them for any sentence (`show`)",
    ),
    _transfer("multi_digit", "integers of one to five digits"),
    _transfer("rationals", "decimals with one place"),
    _transfer("year_spans", "year spans"),
    _transfer("svamp", "SVAMP's word problems", "needs the public file (`data`)"),
    Item(
        "b-figure5", "B", "Figure 5, section 4.1", "what the first heads by path effect look at from the last token",
        LLAMA_2,
        """SELECT 'looks at ' || token_type AS what, layer || '.' || head AS unit, 0 AS rank, argmax_share AS value,
                  NULL AS low, NULL AS high, n
           FROM attention_by_type WHERE run_id = $attention AND operation = 'all' AND argmax_share >= 0.2
           ORDER BY layer, head, argmax_share DESC""",
        why=PICTURE, note="share of prompts in which the largest weight outside BOS is there",
    ),
    Item(
        "b-probe", "B", "section 4.2",
        "from which layer on MLP outputs are closest to the answer's first digit", LLAMA_2,
        """SELECT 'first such layer, ' || operation AS what, '' AS unit, 0 AS rank,
                  min(layer) FILTER (settled) AS value,
                  NULL AS low, NULL AS high, NULL AS n
           FROM paper_b_mlp_probe WHERE run_id = $probe GROUP BY operation ORDER BY operation""",
        shown="", why=PICTURE, note="view paper_b_mlp_probe has the curves",
    ),
    Item("b-case", "B", "section 4.2", 'the answer to "4+3=" read off layer by layer', LLAMA_2, why=NOT_BUILT),
    Item("b-exponents", "B", "appendix", "the key heads on exponentiation", LLAMA_2, why=NOT_BUILT),
    Item(
        "b-mmlu-knockout", "B", "section 4.1", "MMLU (humanities) with the key heads out", LLAMA_2,
        cells=(Cell("original", "42.9"), Cell("key heads out", "42.6")), source=READERS_NOTES,
        why="is made by `mathinterp tune zero` and `evaluate` on the public files",
    ),
    Item(
        "b-table1-7b", "B", "Table 1, section 4.3", "full and precise fine-tuning on benchmarks", LLAMA_2, BENCHMARKS,
        grid(f"""{TASKS}
            base 14.6 30.5 65.4 34.7 46.0 59.8
            full 24.6 53.7 68.2 50.3 40.5 54.0
            precise 27.4 50.6 69.7 55.8 46.4 59.6"""), PROJECT_NOTES,
        note="only the files of the option `data` are read; few-shot prompts may differ; of several tuned models of a"
        " kind, the newest",
        rows_why=OUR_TRAINING,
    ),
    Item(
        "b-table1-13b", "B", "Table 1, section 4.3", "the same on the 13B model", LARGER, BENCHMARKS,
        grid(f"""{TASKS}
            base 28.7 33.7 76.6 45.7 54.8 67.3
            full 44.6 62.2 79.8 62.8 50.2 62.0
            precise 46.3 61.1 82.2 66.6 55.0 67.2"""), PROJECT_NOTES, own_model_only=True,
        rows_why=OUR_TRAINING,
    ),
    Item(
        "b-precise", "B", "section 4.3, on our data",
        "precise fine-tuning of the first heads by path effect, as many random"
        " heads, LoRA and full, all on the signed two-digit set: accuracy on operand pairs it never shows", LLAMA_2,
        "\nUNION ALL\n".join(
            f"""SELECT '{name}, {when}' AS what, '' AS unit, 0 AS rank,
                       (notes -> '{key}' ->> 'exact_match')::DOUBLE AS value,
                       NULL AS low, NULL AS high, NULL AS n FROM runs WHERE run_id = ${name}"""
            for name, when, key in (
                ("precise", "before", "before"), *((name, "after", "after") for name in ("precise", "random", "lora",
                "full"))
            )
        ),
        why="the paper has no such test; it shows the method at work where no benchmark is at hand", baseline="gain",
    ),
    Item(
        "b-parameters", "B", "section 4.3", "billions of parameters that precise fine-tuning of 32 heads trains",
        LLAMA_2,
        """SELECT 'trained' AS what, '' AS unit, 0 AS rank, max(trained_parameters) / 1e9 AS value,
                  max(trained_parameters) / 1e9 AS low, max(trained_parameters) / 1e9 AS high, NULL AS n
           FROM tuning_runs WHERE run_id = $precise""",
        (Cell("trained", "0.07"),), PROJECT_NOTES, shown="", exact=True,
    ),
    Item(
        "b-speed", "B", "section 4.3", "samples a second, full and precise", LLAMA_2,
        "\nUNION ALL\n".join(
            f"""SELECT '{name}' AS what, '' AS unit, 0 AS rank, avg(samples_per_second) AS value,
                       NULL AS low, NULL AS high,
                       NULL AS n FROM tuning_runs WHERE run_id = ${name}"""
            for name in ("full", "precise")
        ),
        (Cell("full", "15"), Cell("precise", "50")), PROJECT_NOTES, shown="", why="other hardware, batches and samples",
    ),
    Item(
        "b-heads-tuned", "B", "section 4.3", "how many heads to tune", LLAMA_2, cells=grid("""
            8 16 32 48 64
            gsm8k 25.4 26.5 27.4 27.4 27.3
            mmlu 45.1 45.8 46.4 46.4 45.5"""), source=READERS_NOTES, why=TRAININGS,
    ),
    Item(
        "b-mlps-tuned", "B", "section 4.3", "32 heads and some MLPs tuned", LLAMA_2, cells=grid("""
            1 3 6 all
            gsm8k 27.5 28.0 28.2 29.2
            mmlu 46.0 45.2 44.9 43.9"""), source=READERS_NOTES, why=TRAININGS,
    ),
)  # fmt: skip
