"""``mathinterp edit``: zero the neurons that add to gender stereotypes (paper A, section 6.2)."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.options import cluster_options, json_option, model_options, out_folder, store_option
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_json
from mathinterp.errors import UserError
from mathinterp.models.units import Neuron

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.base import Experiment
    from mathinterp.models.catalog import ModelSpec, ResolvedModel
    from mathinterp.prompts.prompt import Prompt

DEFAULT_TOP = 18


@click.command()
@model_options()
@click.option("--top", type=click.IntRange(min=1), default=DEFAULT_TOP, show_default=True, help="Neurons to zero.")
@click.option(
    "--control-seeds", type=click.IntRange(min=0), default=5, show_default=True,
    help="Draws of as many random neurons in the same layers.",
)  # fmt: skip
@click.option(
    "--text", type=click.Path(path_type=Path), default=None,
    help="Plain text for the perplexity, passages separated by blank lines; default: short pieces that come along.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, callback=out_folder, help="Folder for the edited model."
)
@store_option()
@cluster_options()
@json_option()
def edit(top: int, control_seeds: int, text: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Find and zero the neurons that add to gender stereotypes of professions (paper A, section 6.2).

    \b
    bias = log p(profession | its stereotyped gender) - log p(profession | the other), nats, over 32 professions and 8
    sentences. Neurons are ranked on the first sentence alone. Random neurons are as many in the same layers. --out is a
    Hugging Face folder whose down_proj columns are zero; it needs no mathinterp.

    \b
    Examples:
      mathinterp edit --model smollm2
      mathinterp edit --model smollm2 --top 18 --text book.txt --out edited
    """
    from mathinterp.cluster.ray_cluster import connection
    from mathinterp.experiments.gender_neurons import GenderNeurons
    from mathinterp.experiments.neuron_edit import NeuronEdit
    from mathinterp.models.catalog import ModelSpec, resolve
    from mathinterp.models.reading import check_embedded
    from mathinterp.prompts.gender import bias_prompts, contrast_prompts
    from mathinterp.prompts.passages import LONGEST, encode_passages, read_passages
    from mathinterp.store import Store
    from mathinterp.tuning.edit import check_free, export_edited

    spec = ModelSpec(*(options.pop(name) for name in ("model", "adapter", "dtype", "trust_remote_code")))
    if out is not None:
        check_free(out)
    resolved = resolve(spec)
    resolved.shape.check_neurons()
    if top > resolved.shape.n_layers * resolved.shape.n_neurons:
        raise UserError(
            f"--top {top}: {resolved.label} has only {resolved.shape.n_layers * resolved.shape.n_neurons} neurons"
        )
    Store(options["store"])  # refuses what is no store before Ray starts
    _check_words(contrast_prompts() + bias_prompts(), resolved)
    longest = min(LONGEST, resolved.shape.positions.limit or LONGEST)
    passages = encode_passages(read_passages(text), resolved.tokenizer, longest)
    for passage in passages:
        check_embedded(str(text or "the bundled text"), passage, resolved)
    with connection(options["address"]):
        found = _run(GenderNeurons(), spec, contrast_prompts(), "gender", **options)
        if not found.complete:
            print_run(found)
            sys.exit(1)
        neurons = _first(found, top)
        chosen = NeuronEdit(neurons, control_seeds, passages)
        edited = _run(chosen, spec, bias_prompts(), "gender bias", **options)
    if edited.complete and out is not None:
        export_edited(resolved, out, neurons=neurons, about={"edit": "gender", "run_id": edited.run_id})
    _show(found, edited, "bundled text" if text is None else str(text), out, as_json)
    if edited.failed or not edited.complete:
        sys.exit(1)


def _check_words(prompts: "Sequence[Prompt]", resolved: "ResolvedModel") -> None:
    from mathinterp.models.reading import read_prompts

    try:
        read_prompts(prompts, resolved)
    except UserError as error:
        raise UserError(
            f"--model {resolved.label} cannot read the gender prompts ({error}); take --model smollm2"
        ) from error


def _run(
    scan: "Experiment", spec: "ModelSpec", prompts: "Sequence[Prompt]", label: str, *, store: str, address: str | None,
    replicas: int | None, gpus_per_replica: float | None,
) -> "RunSummary":  # fmt: skip
    from mathinterp.cluster.dispatch import NoReplicaLeft
    from mathinterp.cluster.run import run_scan

    try:
        return run_scan(
            scan, spec, prompts, store, replicas=replicas, gpus_per_replica=gpus_per_replica, address=address,
            prompts_label=label,
        )  # fmt: skip
    except NoReplicaLeft as error:
        raise click.ClickException(f"{error}; the same command goes on from here") from error


def _first(found: "RunSummary", top: int) -> tuple[tuple[int, int], ...]:
    from mathinterp.store import Store

    rows = Store(found.store).rows(
        f"SELECT layer, neuron FROM gender_neurons WHERE run_id = '{found.run_id}' AND rank <= {top} ORDER BY rank"
    )
    return tuple(Neuron(row["layer"], row["neuron"]) for row in rows)


def _show(found: "RunSummary", edited: "RunSummary", text: str, out: Path | None, as_json: bool) -> None:
    from mathinterp.store import Store

    queries = {
        "bias": f"SELECT * EXCLUDE (run_id) FROM paper_a_table12 WHERE run_id = '{edited.run_id}'"
        " ORDER BY stereotype = 'all' DESC, stereotype",
        "neurons": "SELECT rank, layer || '.' || neuron AS neuron, change, change_woman, change_man"
        f" FROM gender_neurons WHERE run_id = '{found.run_id}' AND rank <= {DEFAULT_TOP} ORDER BY rank",
        "perplexity": "SELECT * EXCLUDE (run_id) FROM edit_perplexity"
        f" WHERE run_id = '{edited.run_id}' ORDER BY edit = 'original' DESC, edit, seed",
        "professions": f"SELECT * FROM paper_a_table22 WHERE run_id = '{edited.run_id}' ORDER BY original DESC",
    }
    store = Store(edited.store)
    rows = {name: store.rows(query) for name, query in queries.items()} if edited.complete else {}
    if as_json:
        print_json({"found": run_json(found), **run_json(edited), "out": None if out is None else str(out), **rows})
        return
    if rows:
        print_table(rows["bias"], title="Gender bias (nats), neurons zeroed against random neurons of the same layers")
        print_table(rows["neurons"], title="Neurons that add most to the stereotypes, nats over all professions")
        print_table(rows["perplexity"], title=f"Ordinary text ({text}), nats a token")
        if out is not None:
            console.print(f"The edited model is in {out}", highlight=False, soft_wrap=True)
    print_sql_hint(edited.store, list(queries.values()))
    print_run(found)
    print_run(edited)
