"""Paper A: its 27 tables and two figures (arXiv 2409.14144, read as published; numbers as printed)."""

from mathinterp.workflows.papers.item import PROJECT_NOTES, Cell, Item, grid, units, values
from mathinterp.workflows.papers.queries import (
    CHAIN_HEADS,
    CHAIN_NEURONS,
    CONCEPT_COUNTS,
    SYMBOLS,
    carry_decreases,
    concepts_zeroed,
    costly_heads,
    head_accuracies,
    head_decreases,
    mask_keep,
    root_zeroed,
)

LLAMA, GPT_J = "Llama-7B", "GPT-J-6B"
PICTURE = "a figure, given only as a picture"
WORDS = "words, not numbers"
OTHER_PROMPTS = "ours write numbers as digits; the paper's also as words"


def _by_digits(number: int, operation: str, name: str, printed: str) -> Item:
    """One of Tables 24 to 27: the five most costly heads for an operation in one, two and three digits."""
    rows = [line.split() for line in printed.strip().splitlines()]
    cells = [
        Cell(f"{digits} {operation}", text, head, rank)
        for heads, accuracies in zip(rows[::2], rows[1::2], strict=True)
        for digits in [accuracies[0]]
        for rank, (head, text) in enumerate(zip(["original", *heads], accuracies[1:], strict=True))
    ]
    runs = (("heads_1d", "1D"), ("heads_2d", "2D"), ("heads_3d", "3D"))
    queries = (head_accuracies(run, f"operation = '{operation}' AND {SYMBOLS}", f"{d} ") for run, d in runs)
    return Item(
        f"a-table{number}", "A", f"Table {number}, appendix E", f"accuracy under the five most costly heads, {name}",
        LLAMA, "\nUNION ALL\n".join(f"SELECT * FROM ({query})" for query in queries), tuple(cells), baseline="loss",
    )  # fmt: skip


PAPER_A: tuple[Item, ...] = (
    Item(
        "a-figure1", "A", "Figure 1, section 1",
        'the four stages from "3+5=" to "8"; here the probability of the answer'
        " with each head zeroed", LLAMA, CHAIN_HEADS,
        units("ori 17.22 13.15 14.19 15.9 1.8 6.20\np(answer) .37760 .06160 .1539 .2145 .2403 .2475 .2636"),
        PROJECT_NOTES, shown="", exact=True, note="the figure is a drawing; these numbers are the authors' code's",
    ),
    Item(
        "a-table1", "A", "Table 1, section 3.3", "accuracy with one head zeroed, two-digit sentences", LLAMA,
        head_accuracies("heads_2d", over_all=True), units("""
            ori  17.22 15.9 14.19 15.23 16.1
            all 74.8 53.4 62.1 62.7 68.1 68.7
            add 96.8 42.9 83.2 92.5 89.7 91.6
            sub 94.4 72.3 84.6 93.2 86.5 79.1
            mul 56.6 50.5 50.9 51.3 52.3 56.9
            div 51.4 48.2 29.5 13.8 43.8 47.1"""),
        note=OTHER_PROMPTS, baseline="loss",
    ),
    Item(
        "a-heads", "A", "text of section 3.3", "how many heads cost how much accuracy over all operations", LLAMA,
        costly_heads("heads_2d"),
        (Cell("heads that cost 10 points or more", "3"), Cell("heads that cost 0.01 to 2 points", "976"),
         Cell("heads", "1024")),
        shown="", baseline="loss",
        note="the interval of the count: heads that cost surely as much, to those that surely cost less left out, at"
        " 95 % for all heads together (Bonferroni)",
    ),
    Item(
        "a-table2", "A", "Table 2, section 3.4", "relative decrease under each operation's head, by digits", LLAMA,
        "\nUNION ALL\n".join(
            f"SELECT * FROM ({head_decreases(run, SYMBOLS, label)})"
            for run, label in (("heads_1d", "1D "), ("heads_2d", "2D "), ("heads_3d", "3D "))
        ),
        tuple(
            Cell(f"{digits} {operation}", text, head, 1)
            for digits, row in (("1D", "46.5 62.2 6.8 54.9"), ("2D", "58.4 52.6 11.2 71.8"), ("3D",
            "52.5 56.9 8.1 53.2"))
            for (operation, head), text in zip(
                (("add", "17.22"), ("sub", "17.22"), ("mul", "20.18"), ("div", "14.19")), row.split(), strict=True
            )
        ),
        note="its 3D row does not follow from Tables 24 to 27, as the others do", baseline="loss",
    ),
    Item(
        "a-table3", "A", "Table 3, section 3.4", "relative decrease on answer tokens without and with a carry", LLAMA,
        carry_decreases("heads_2d"),
        tuple(
            Cell(f"{row} {operation}", text, head, 1)
            for row, printed in (("memorize", "59.2 49.8 11.6 63.6"), ("change-one", "57.1 65.5 11.3 75.2"))
            for (operation, head), text in zip(
                (("add", "17.22"), ("sub", "17.22"), ("mul", "20.18"), ("div", "14.19")), printed.split(), strict=True
            )
        ),
        note="which prompts the paper counts is not said; ours are the two-digit sentences", baseline="loss",
    ),
    Item(
        "a-table4", "A", "Table 4, section 4.2", 'the neurons that lose most importance for "3+5=" with a head zeroed',
        LLAMA, CHAIN_NEURONS, tuple(
            Cell(f"{what}, {side}", text, unit, rank)
            for rank, (unit, row) in enumerate(
                (("28.3696", "0.82 6.21 0.13 0.95"), ("25.7164", "0.31 8.44 0.07 2.08"), ("19.5769",
                "0.20 3.79 0.06 1.28")),
                start=1,
            )
            for (what, side), text in zip(
                (("importance", "original"), ("coefficient", "original"), ("importance", "intervened"),
                 ("coefficient", "intervened")), row.split(), strict=True,
            )
        ),
        shown="", exact=True, note="coefficients without their sign, as printed; `mathinterp neuron` shows the tokens",
    ),
    Item(
        "a-table5", "A", "Table 5, section 4.2", "relative decrease with a prompt's first neurons zeroed (mask), or all"
        " other deep ones (keep); one-digit + and -", LLAMA, mask_keep("maskkeep_1d", "correct"), grid("""
            top99 top50 top30 top20 top10
            mask 100.0 96.0 89.5 86.8 68.4
            keep 3.9 7.8 13.2 18.4 38.2
            coef 49.1 60.4 67.2 72.7 77.1"""),
        note="prompts that the model answers rightly; the paper does not say which it counts", baseline="loss",
    ),
    Item(
        "a-table6", "A", "Table 6, section 4.3", "fall of the first neurons' coefficients with the lowest one zeroed",
        LLAMA, root_zeroed("graph_1d"), grid("top99 top50 top30 top20 top10\ncoef 15.8 14.8 12.5 9.5 4.4"),
    ),
    Item(
        "a-table7", "A", "Table 7, section 4.4", "first tokens of shallow neurons, read directly and through attention",
        LLAMA, why=WORDS, note="view paper_a_table17 of the concept scan has these words for every model",
    ),
    Item(
        "a-table8", "A", "Table 8, section 4.4", "shallow neurons that attention turns into numbers and operations, and"
        " relative decrease with all of them zeroed; one-digit + and -", LLAMA,
        f"{CONCEPT_COUNTS}\nUNION ALL\n{concepts_zeroed('zeroing_1d')}",
        (*grid("M=0 M=1 M=2 M=3\nnumber 51,980 10,426 1,953 510\naccuracy 98.7 68.4 53.9 43.4"), Cell("random M=2",
        "2.6")),
        note="the paper's list of concepts is not published, so counts cannot agree but by chance", baseline="loss",
    ),
    Item(
        "a-figure2", "A", "Figure 2, section 5", "accuracy with a LoRA in one layer, by layer; numbers of the text",
        LLAMA,
        """SELECT CASE WHEN layer = -1 THEN 'original' ELSE 'layer ' || layer END AS what, '' AS unit, 0 AS rank,
                  accuracy AS value, low, high, (SELECT min(prompts) FROM accuracies WHERE run_id = $sweep) AS n
           FROM paper_a_table9 WHERE run_id = $sweep ORDER BY layer""",
        values(original="62.96"),
        note="layer by layer the paper gives a picture and 'around 90 %' for 1 to 9; layers are the model's own",
        baseline="gain",
    ),
    Item(
        "a-table9", "A", "Table 9, section 5", 'coefficients of three neurons for "3+5=" under five of these LoRAs',
        LLAMA,
        """SELECT 'layer ' || tuned_layer AS what, layer || '.' || neuron AS unit, rank,
                  abs(tuned_coefficient) AS value,
                  NULL AS low, NULL AS high, NULL AS n
           FROM sweep_neurons AS s JOIN run_records AS r USING (run_id)
           JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
           WHERE s.run_id = $sweep_neurons AND p.operation = 'add' AND p.operand_a = '3' AND p.operand_b = '5'
             AND (rank <= 3 OR list_contains($units, layer || '.' || neuron))
           ORDER BY tuned_layer, rank""",
        tuple(
            Cell(f"layer {layer}", text, unit, rank)
            for rank, (unit, row) in enumerate(
                (("28.3696", "3.6 6.3 3.9 5.7 4.1"), ("25.7164", "16.1 11.8 11.0 13.9 9.7"),
                 ("19.5769", "9.2 7.7 6.1 5.1 3.8")),
                start=1,
            )
            for layer, text in zip((9, 15, 16, 19, 20), row.split(), strict=True)
        ),
        shown="", why="of single trainings, whose seeds and rank are not published",
        note="layers are the model's own, neurons go by how much a LoRA enhances them, and a limit may leave out"
        ' the prompt "3 + 5 ="',
    ),
    Item(
        "a-table10", "A", "Table 10, section 5",
        "how much the LoRAs enlarge the coefficients they enhance most, by layers",
        LLAMA, """SELECT 'layers ' || band || ' ' || name AS what, '' AS unit, 0 AS rank, value,
                         NULL AS low, NULL AS high,
                         NULL AS n
                  FROM (UNPIVOT (SELECT band, top50, top30, top20, top10 FROM paper_a_table10
                  WHERE run_id = $sweep_neurons)
                        ON top50, top30, top20, top10 INTO NAME name VALUE value)""",
        tuple(
            Cell(f"layers {band} {top}", text)
            for band, row in (("1-9", "42 49 57 59"), ("10-16", "29 36 44 53"), ("17-30", "2 11 14 28"))
            for top, text in zip(("top50", "top30", "top20", "top10"), row.split(), strict=True)
        ),
        note="layers of 32; of a model with L layers, layer l counts as 32 l / L",
    ),
    Item(
        "a-table11", "A", "Table 11, section 6.1", "accuracy with a LoRA, before and after deep neurons are pruned",
        LLAMA,
        """SELECT condition AS what, '' AS unit, 0 AS rank, avg(accuracy) AS value,
                  CASE WHEN count(*) = 1 THEN any_value(low) END AS low,
                  CASE WHEN count(*) = 1 THEN any_value(high) END AS high,
                  (SELECT min(prompts) FROM accuracies WHERE run_id = $prune AND operation <> 'all') AS n
           FROM paper_a_table11 WHERE run_id = $prune GROUP BY condition""",
        (Cell("origin", "62.9"), Cell("lora", "89.3"), Cell("pruned_lora", "82.3"), Cell("random_lora", "17.1")),
        baseline="gain",
    ),
    Item(
        "a-table12", "A", "Table 12, section 6.2", "two neurons with gender bias: importance and coefficient for one"
        " profession", LLAMA, """SELECT 'importance over all professions, nats' AS what,
            layer || '.' || neuron AS unit, rank,
            change AS value, NULL AS low, NULL AS high, professions AS n
            FROM gender_neurons WHERE run_id = $gender AND (rank <= 2 OR list_contains($units,
            layer || '.' || neuron))""",
        tuple(
            Cell(f"{what}, {gender}", text, unit, rank)
            for rank, (unit, row) in enumerate((("22.2651", "0.24 6.48 0.06 1.53"), ("19.8436",
            "0.16 3.39 0.01 0.14")), start=1)
            for (what, gender), text in zip(
                (("importance", "woman"), ("coefficient", "woman"), ("importance", "man"), ("coefficient", "man")),
                row.split(), strict=True,
            )
        ),
        shown="", why="which profession each neuron's numbers are of is not said; ours are over all professions",
    ),
    Item(
        "a-table13", "A", "Table 13, section 6.2",
        "gender bias, log p(profession) under one gender less the other, before"
        " and after 18 neurons are zeroed", LLAMA,
        """SELECT s.name || ', ' || edit AS what, '' AS unit, 0 AS rank, bias AS value,
                  bias_low AS low, bias_high AS high, n
           FROM gender_effects JOIN (VALUES ('all', 'total'), ('woman', 'woman'), ('man', 'man')) AS s(stereotype, name)
                USING (stereotype)
           WHERE run_id = $gender_edit AND edit IN ('original', 'edited')""",
        tuple(
            Cell(f"{bias}, {edit}", text)
            for edit, row in (("original", "1.26 1.45 1.08"), ("edited", "0.81 1.04 0.59"))
            for bias, text in zip(("total", "woman", "man"), row.split(), strict=True)
        ),
        shown="", note="the paper's section says four prompts, its appendix eight; ours are the eight",
    ),
    Item(
        "a-table14", "A", "Table 14, appendix A", "the four sentences of each operation", LLAMA, why=WORDS,
        note="ours are these, word for word: `mathinterp prompts` shows the set two_digit",
    ),
    Item(
        "a-table15", "A", "Table 15, appendix B", "as Table 5 for one-digit division and its head", LLAMA,
        mask_keep("maskkeep_div", "flipped"), grid("""
            top99 top50 top30 top20 top10
            mask 84.6 82.1 74.4 66.7 51.3
            keep 48.7 51.3 53.9 53.9 64.2
            coef 50 61 67 70 73"""),
        note="prompts that the zeroed head makes wrong, which gives the paper's 39 cases", baseline="loss",
    ),
    Item(
        "a-table16", "A", "Table 16, appendix B", "as Table 6 for one-digit division", LLAMA, root_zeroed("graph_div"),
        grid("top99 top50 top30 top20 top10\ncoef 1.3 0.9 3.2 4.9 7.0"),
    ),
    Item(
        "a-table17", "A", "Table 17, appendix B", "as Table 8 for one-digit division", LLAMA,
        f"{CONCEPT_COUNTS}\nUNION ALL\n{concepts_zeroed('zeroing_div')}",
        (*grid("M=0 M=1 M=2 M=3\nnumber 51,980 10,426 1,953 510\naccuracy 97.5 82.1 30.8 25.7"), Cell("random M=1",
        "5.1")),
        note="see a-table8", baseline="loss",
    ),
    Item(
        "a-table18", "A", "Table 18, appendix C", "as Table 1 on GPT-J", GPT_J, head_accuracies("heads_2d",
        over_all=True),
        units("""
            ori  7.0 13.9 0.11 15.6 14.14
            all 74.5 63.6 64.4 65.0 68.8 70.8
            add 97.0 95.0 94.0 98.0 95.0 97.0
            sub 78.6 63.6 41.8 63.6 74.5 80.0
            mul 71.0 54.0 72.0 53.0 59.0 72.0
            div 51.5 42.0 50.0 45.6 46.7 34.4"""),
        note=OTHER_PROMPTS, own_model_only=True, baseline="loss",
    ),
    Item(
        "a-table19", "A", "Table 19, appendix C", "as Table 5 on GPT-J, two-digit subtraction", GPT_J,
        mask_keep("maskkeep_sub", "correct"), grid("""
            top99 top50 top30 top20 top10
            mask 58.4 45.9 33.4 25 25
            keep 37.5 50 54.1 83.4 95.9
            coef 17 20 21 23 29"""),
        own_model_only=True, baseline="loss",
    ),
    Item(
        "a-table20", "A", "Table 20, appendix C", "as Table 6 on GPT-J", GPT_J, root_zeroed("graph_sub"),
        grid("top99 top50 top30 top20 top10\ncoef 1.9 1.7 1.6 1.2 1.9"), own_model_only=True,
    ),
    Item(
        "a-table21", "A", "Table 21, appendix C", "as Table 8 on GPT-J", GPT_J,
        f"{CONCEPT_COUNTS}\nUNION ALL\n{concepts_zeroed('zeroing_sub')}",
        grid("M=0 M=1 M=2 M=3\nnumber - 4,272 1,228 564\naccuracy - 100.0 83.4 20.8"), own_model_only=True,
        baseline="loss",
    ),
    Item(
        "a-table22", "A", "Table 22, appendix D", "the eight sentences of the gender edit", LLAMA, why=WORDS,
        note="ours are these, word for word (mathinterp/prompts/gender.json)",
    ),
    Item(
        "a-table23", "A", "Table 23, appendix D", "professions with gender bias", LLAMA, why=WORDS,
        note="ours are these 32 (mathinterp/prompts/gender.json)",
    ),
    _by_digits(24, "add", "addition", """
        17.22 15.23 6.20 13.15 14.19
        1D 88.9 47.6 82.8 84.1 84.1 84.1
        17.22 15.9 13.2 6.20 12.16
        2D 94.5 39.3 86.0 87.9 88.6 89.2
        17.22 8.10 15.23 12.16 15.9
        3D 96.1 46.4 82.7 83.5 85.2 87.2"""),
    _by_digits(25, "sub", "subtraction", """
        17.22 16.1 15.23 2.26 13.2
        1D 82.0 31.0 51.0 53.0 57.0 65.0
        16.1 17.22 13.2 15.23 12.16
        2D 80.0 33.9 37.9 61.8 63.3 70.6
        16.1 17.22 15.23 13.2 12.16
        3D 57.1 19.6 22.9 29.3 34.3 40.7"""),
    _by_digits(26, "mul", "multiplication", """
        3.5 20.18 6.24 17.22 0.30
        1D 93.0 85.4 86.7 87.3 89.2 89.2
        15.9 14.19 17.22 20.18 3.5
        2D 56.9 49.3 50.1 50.5 50.5 51.6
        3.5 15.9 14.19 13.19 2.14
        3D 32.8 25.9 29.7 30.3 31.1 31.1"""),
    _by_digits(27, "div", "division", """
        14.19 15.9 21.24 6.24 16.21
        1D 78.9 35.6 61.1 65.6 67.8 68.9
        14.19 12.1 3.3 16.21 1.29
        2D 48.6 13.7 30.2 31.4 36.9 38.8
        14.19 3.3 12.1 6.22 15.9
        3D 19.0 9.67 12.7 13.0 13.3 13.7"""),
)  # fmt: skip
