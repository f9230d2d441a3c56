"""``mathinterp scan concepts``: hidden-interpretable shallow neurons, and what zeroing them costs."""

import sys
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.options import (
    cluster_options,
    json_option,
    model_options,
    parse_layers,
    prompt_options,
    store_option,
)
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen, run_json
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.concepts import Concepts


@click.command()
@model_options()
@prompt_options()
@click.option("--concepts", "concept_file", default=None, metavar="FILE", help="JSON: category -> list of concepts.")
@click.option(
    "--top",
    type=int,
    default=None,
    help="Tokens that count as first; default 50 (5 to 50 below a vocabulary of 32,000).",
)
@click.option("--layers", default=None, help="Layers of the neurons; default the lower half (0-15 of 32).")
@click.option("--attention-layers", default=None, help="Default the lower half and one more (0-16 of 32).")
@click.option(
    "--into", default="later", show_default=True, help="later: attention layers above the neuron's own; or all."
)
@click.option("--sign", default="plus", show_default=True, help="plus: a neuron's value as it is; or both signs.")
@click.option("--count", default="distinct", show_default=True, help="distinct concepts, or all tokens that are one.")
@click.option("--levels", default="0,1,2,3", show_default=True, help="A neuron is kept at level M if hits > M.")
@click.option("--zero/--no-zero", default=True, show_default=True, help="Zero each level's neurons on the prompts.")
@click.option(
    "--control-seeds", type=int, default=3, show_default=True, help="Random sets as large in each layer, a level."
)
@click.option("--scoring", default="token", show_default=True, help="token, first_token or exact_match.")
@click.option("--show", default=8, show_default=True, type=click.IntRange(min=1), help="Neurons shown.")
@store_option()
@cluster_options()
@json_option()
def concepts(
    concept_file: str | None, top: int | None, layers: str | None, attention_layers: str | None, into: str, sign: str,
    count: str, levels: str, zero: bool, control_seeds: int, scoring: str, show: int, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Neurons that become numbers and operations when attention moves them (paper A, section 4.4).

    \b
    Every neuron's value goes through every attention layer's value-output matrix (all heads at weight 1) to the
    vocabulary; hits are the concepts among the first tokens, through the best attention layer. Then all neurons with
    hits > M are zeroed at once, against random ones. A concept file is a JSON object: category -> list of concepts,
    each a spelling or a list of spellings that count as one; spellings in small letters are found in any case.

    \b
    Examples:
      mathinterp scan concepts --limit 200
      mathinterp scan concepts --model smollm2 --adapter smollm2-arithmetic --layers 0-3 --attention-layers 0-4
      mathinterp scan concepts --concepts my_concepts.json --top 10 --sign both --no-zero
    """
    from mathinterp.experiments.concept_zeroing import check_zeroing
    from mathinterp.experiments.concepts import Concepts
    from mathinterp.experiments.concepts.words import read_concepts

    kept_at = _parse_levels(levels)
    check_zeroing(control_seeds, scoring)
    chosen = Concepts(
        read_concepts(concept_file),
        1 if top is None else top,
        parse_layers(layers),
        parse_layers(attention_layers, "--attention-layers"),
        into,
        sign,
        count,
    )
    chosen = _fit_to_model(chosen, top, options)
    # The weights alone are read: on the set's first prompt, so that another --limit does not do it all again.
    run = run_chosen(chosen, **{**options, "limit": 1})
    zeroing = _zero(run, kept_at, control_seeds, scoring, options) if run.complete and zero else None
    _show(run, zeroing, chosen, kept_at, show, as_json)
    if not run.complete or (zeroing is not None and not zeroing.complete):
        sys.exit(1)


def _parse_levels(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--levels '{text}' cannot be read; write whole numbers like 0,1,2,3")
    return sorted({int(part) for part in parts})


def _fit_to_model(chosen: "Concepts", top: int | None, options: dict[str, Any]) -> "Concepts":
    """The scan with ``top`` resolved, after finding its concepts among the model's tokens: before anything starts."""
    from dataclasses import replace

    from mathinterp.experiments.concepts import default_top, match_vocabulary
    from mathinterp.models.catalog import ModelSpec, resolve

    model = resolve(ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code"))))
    match_vocabulary(chosen.looked_for, model.tokenizer, model.shape.vocabulary)
    return replace(chosen, top=default_top(model.shape.vocabulary) if top is None else top)


def _zero(
    run: "RunSummary", levels: list[int], seeds: int, scoring: str, options: dict[str, Any]
) -> "RunSummary | None":
    """Zero the kept neurons of each level; None where no neuron is kept."""
    from mathinterp.experiments.concept_zeroing import ConceptZeroing, NeuronSet
    from mathinterp.experiments.concepts.summary import kept_neurons
    from mathinterp.store import Store

    sets = tuple(NeuronSet(*item) for item in kept_neurons(Store(run.store), run.run_id, levels).items())
    return run_chosen(ConceptZeroing(sets, run.run_id, seeds, scoring), **options) if sets else None


def _show(
    run: "RunSummary", zeroing: "RunSummary | None", chosen: "Concepts", levels: list[int], show: int, as_json: bool
) -> None:
    from dataclasses import asdict

    from mathinterp.experiments.concepts.summary import missing_controls, summarize_concepts, zeroing_table
    from mathinterp.store import Store

    store = Store(run.store)
    found: dict[str, Any] = {}
    if run.complete:
        found = {"top_tokens": chosen.top, **asdict(summarize_concepts(store, run.run_id, levels, show))}
    decreases: list[dict[str, Any]] = []
    missing: list[str] = []
    if zeroing is not None and zeroing.complete:
        decreases, missing = zeroing_table(store, zeroing.run_id), missing_controls(store, zeroing.run_id)
    if as_json:
        told = {"decreases": decreases, "missing_controls": missing}
        print_json({**run_json(run), **found, "zeroing": zeroing and {**run_json(zeroing), **told}})
        return
    if found:
        print_table(found["levels"], title=f"Neurons with concepts among their first {chosen.top} tokens")
        luck = found["chance"]
        console.print(
            "neurons: through the best attention layer; one layer, random: neurons and random directions through one"
            f" attention layer, on average. {luck['tokens']} tokens spell {luck['concepts']} of the"
            f" {len(chosen.looked_for.concepts)} concepts: in a random order {luck['expected_hits']:.3g} of the first"
            f" {chosen.top} would be one.",
            highlight=False,
        )
        print_table(found["examples"], title="Most hits")
    if decreases:
        print_table(decreases, title="All of them at zero: relative decrease of accuracy (%), 95 % interval")
        for line in missing:
            console.print(line, highlight=False)
    elif found:
        console.print("No neurons were zeroed.", highlight=False)
    where = f"WHERE run_id = '{run.run_id}'"
    queries = [
        f"SELECT * FROM paper_a_table17 {where} ORDER BY rank LIMIT 20",
        f"SELECT * FROM concept_layers {where} ORDER BY layer, attention_layer",
    ]
    if zeroing is not None:
        queries.append(f"SELECT * FROM concept_zeroing_effects WHERE run_id = '{zeroing.run_id}'")
    print_sql_hint(run.store, queries)
    _print_reading(run)
    if zeroing is not None:
        print_run(zeroing)


def _print_reading(run: "RunSummary") -> None:
    """The closing lines of the scan itself, which makes no forward pass and so has no such pace."""
    console.print(
        f"Run {run.run_id}: {run.rows:,} rows in {run.seconds:.1f} s; {run.reused} of {run.shards} shards were there"
        " already.",
        highlight=False,
    )
    for failure in run.failed:
        click.echo(f"shard {failure.key} was given up: {failure.error} (traceback in the run's record)", err=True)
    if not run.complete:
        click.echo("the run is incomplete: the same command runs what is missing", err=True)
