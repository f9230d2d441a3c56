"""``mathinterp prompts``: list the prompt sets, show one, or write it to a file."""

from dataclasses import asdict
from typing import Any

import click

from mathinterp.cli.options import json_option, model_options, out_file, prompt_options, spec_of
from mathinterp.cli.output import console, print_json, print_table


@click.command()
@prompt_options()
@model_options()
@click.option("--list", "list_sets", is_flag=True, help="List the prompt sets.")
@click.option("--counterfactuals", is_flag=True, help="Add X_c, the sentence with a neutral operator.")
@click.option("--out", default=None, callback=out_file, help="Write the prompts to this JSON-lines file.")
@click.option(
    "--form",
    type=click.Choice(["mathinterp", "mib"]),
    default="mathinterp",
    show_default=True,
    help="Of the file: our fields, or pairs as rows of MIB.",
)
@json_option()
def prompts(
    prompt_name: str, limit: int | None, seed: int, list_sets: bool, counterfactuals: bool, out: str | None,
    form: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Show prompts as a model sees them: text, answer, and which answer tokens are scored.

    --prompts takes a set, a file of JSON lines, or a public file of word problems: svamp:, addsub:, singleeq:,
    multiarith: or gsm8k: and its path, for example svamp:SVAMP.json. Also files of MIB's rows, and its sets on the hub:
    mib-bench/arithmetic_addition (:train, :test; else validation), mib-bench/arithmetic_subtraction, mib-bench/ioi.

    \b
    Examples:
      mathinterp prompts --list
      mathinterp prompts --prompts two_digit --limit 8 --model smollm2
      mathinterp prompts --prompts pairs --counterfactuals --out pairs.jsonl
      mathinterp prompts --prompts one_token_pairs --form mib --out mib.jsonl
    """
    if list_sets:
        print_json(_sets(seed)) if as_json else print_table(_sets(seed))
        return
    from mathinterp.models.catalog import resolve
    from mathinterp.prompts import load_prompts, write_prompts
    from mathinterp.prompts.alignment import tokenize_prompts
    from mathinterp.prompts.mib import fitting, write_rows
    from mathinterp.prompts.pairs import with_counterfactuals

    tokenizer = resolve(spec_of(options)).tokenizer
    chosen = list(fitting(load_prompts(prompt_name, seed=seed, limit=limit), tokenizer))
    if counterfactuals:
        chosen = with_counterfactuals(chosen, tokenizer)
    tokenized = tokenize_prompts(chosen, tokenizer)
    if out is not None:
        (write_rows if form == "mib" else write_prompts)(chosen, out)
        console.print(f"{len(chosen)} prompts written to {out}")
        return
    if as_json:
        print_json([asdict(prompt) for prompt in chosen])
        return
    rows: list[dict[str, Any]] = []
    for prompt in tokenized:
        scored = " ".join(f"{t.token.strip()}:{t.carry_class or t.kind}" for t in prompt.scored)
        sentence = prompt.prompt
        row: dict[str, Any] = {"prompt_id": sentence.prompt_id, "text": sentence.text, "answer": sentence.answer}
        if counterfactuals:
            row["counterfactual"] = sentence.counterfactual
        rows.append({**row, "tokens": len(prompt.fed), "scored": scored})
    print_table(rows)
    total = sum(len(prompt.scored) for prompt in tokenized)
    console.print(f"{len(tokenized)} prompts, {total} scored answer tokens")


def _sets(seed: int) -> list[dict[str, Any]]:
    """Name, size, description and first sentence of each set; the size and sentence of a file are its own."""
    from mathinterp.prompts import PROMPT_SETS, WORD_PROBLEMS

    rows: list[dict[str, Any]] = []
    for name, entry in PROMPT_SETS.items():
        built = entry.build(seed)
        first = {"example": built[0].text, "answer": built[0].answer}
        rows.append({"name": name, "prompts": len(built), "description": entry.description, **first})
    for name in WORD_PROBLEMS:
        description = f"the public file {name}, read as it is published; no counterfactuals"
        rows.append(
            {"name": f"{name}:PATH", "prompts": None, "description": description, "example": None, "answer": None}
        )
    return rows
