"""``mathinterp knockout``: take out the first heads of a ranking together, against random heads; or find a ranking."""

import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
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
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.iterative import Iterative
    from mathinterp.experiments.knockout import Knockout, Sentence
    from mathinterp.models.catalog import ResolvedModel

Ranking = tuple[Head, ...]

logger = logging.getLogger(__name__)


@click.command()
@model_options()
@prompt_options()
@click.option("--heads", default=None, help="The ranking, most important head first: 17.22,14.19,...")
@click.option(
    "--rank-from",
    default=None,
    metavar="RUN_ID",
    help="Take the ranking from a finished run: a head scan, a path scan, or iterative masking.",
)
@click.option("--rank-operation", default="all", show_default=True, help="Rank by this operation alone.")
@click.option("--ks", default=None, help="Numbers of heads; default 0,1,2,4,...,64 up to half of all heads.")
@click.option(
    "--control-seeds",
    type=int,
    default=5,
    show_default=True,
    help="Draws of random heads, and as many layer-matched ones.",
)
@click.option(
    "--show",
    "sentences",
    multiple=True,
    metavar="SENTENCE",
    help="Also show this sentence's five likeliest next tokens for every k; may be given again.",
)
@click.option(
    "--iterative",
    "steps",
    type=int,
    default=None,
    metavar="N",
    help="Find a ranking instead: mask the worst head, rank the others again, N times.",
)
@click.option("--rank-by", default="accuracy", show_default=True, help="For --iterative: accuracy or logprob.")
@click.option("--layers", default=None, help="For --iterative: only heads of these layers, for example 0-3,17.")
@click.option(
    "--ablation",
    default="mean",
    show_default=True,
    help="mean over the counterfactual prompts; zero; or resample from the paired counterfactual.",
)
@click.option("--positions", default=None, help="all or end; default: all for zero, else end.")
@click.option(
    "--scoring",
    default=None,
    help="token, first_token or exact_match; default token, or first_token when only END is edited.",
)
@click.option("--engine", default="auto", show_default=True, help="auto, packed or plain (slow).")
@store_option()
@cluster_options()
@json_option()
def knockout(
    heads: str | None, rank_from: str | None, rank_operation: str, ks: str | None, control_seeds: int,
    sentences: tuple[str, ...], steps: int | None, rank_by: str, layers: str | None, ablation: str,
    positions: str | None, scoring: str | None, engine: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Knock out the first k heads of a ranking together, and as many random heads: accuracy against k.

    \b
    Random heads are never heads of the ranking that are knocked out, nor key heads (effect below -5 %) of the run of
    --rank-from, nor any of --heads; "random_layer" has as many in each layer as the first k. The ranking's heads may
    come from other prompts than those of --prompts: so it is seen whether they hold there too.
    --iterative N costs about N head scans of the same prompts, one after another on one replica.

    \b
    Examples:
      mathinterp knockout --heads 0.6,0.1,0.2,0.7 --ablation zero
      mathinterp scan heads --limit 400; mathinterp knockout --limit 400 --rank-from RUN_ID
      mathinterp knockout --rank-from RUN_ID --prompts pairs --show "3 plus 5 is"
      mathinterp knockout --iterative 8 --limit 160
    """
    from mathinterp.engine.choose import ENGINES

    if engine not in ENGINES:
        raise UserError(f"--engine '{engine}' is not known; take one of {', '.join(ENGINES)}")
    edit = {"ablation": ablation, "positions": positions, "scoring": scoring, "engine": engine}
    ranked = heads is not None or rank_from is not None
    if steps is not None:
        if ranked or sentences or ks is not None:
            raise UserError("--iterative finds a ranking and takes none: leave out --heads, --rank-from, --ks, --show")
        _find_ranking(steps, rank_by, layers, edit, as_json, options)
        return
    if layers is not None or rank_by != "accuracy":
        raise UserError("--layers and --rank-by belong to --iterative")
    if not ranked or (heads is not None and rank_from is not None):
        raise UserError(
            "give the heads' ranking in one way: --heads 5.1,3.2,... or --rank-from RUN_ID (from 'scan heads')"
            "; or find one with --iterative N"
        )
    ranking, key = _ranking(heads, rank_from, rank_operation, options["store"])
    _knock_out(ranking, key, parse_ks(ks), control_seeds, sentences, edit, as_json, options)


def _ranking(heads: str | None, rank_from: str | None, operation: str, store: str) -> tuple[Ranking, Ranking]:
    """The ranking, and the key heads that no control may hold: those of the run, or all that are named."""
    from mathinterp.experiments.knockout.summary import key_heads_from, ranking_from
    from mathinterp.store import Store

    if rank_from is not None:
        opened = Store(store)
        return ranking_from(opened, rank_from, operation), key_heads_from(opened, rank_from, operation)
    assert heads is not None
    if operation != "all":
        raise UserError("--rank-operation belongs to --rank-from")
    named = parse_ranking(heads)
    return named, named


def parse_ranking(text: str) -> Ranking:
    """ "17.22,14.19" -> ((17, 22), (14, 19)), in the order given; raises UserError for anything else."""
    ranking = []
    for part in text.split(","):
        layer, dot, head = part.strip().partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"--heads '{text}' cannot be read; write layer.head, like 17.22,14.19")
        ranking.append(Head(int(layer), int(head)))
    return tuple(ranking)


def parse_ks(text: str | None) -> tuple[int, ...] | None:
    """ "0,1,2,4" -> (0, 1, 2, 4); raises UserError for anything else."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--ks '{text}' cannot be read; write numbers of heads, like 0,1,2,4")
    return tuple(int(part) for part in parts)


def _knock_out(
    ranking: Ranking, key: Ranking, ks: tuple[int, ...] | None, seeds: int, texts: tuple[str, ...],
    edit: dict[str, Any], as_json: bool, options: dict[str, Any],
) -> None:  # fmt: skip
    from mathinterp.experiments.knockout import Knockout
    from mathinterp.experiments.knockout.summary import summarize_knockout
    from mathinterp.store import Store

    chosen = Knockout(**edit, ranking=ranking, key=key, ks=ks, seeds=seeds)
    if texts:
        chosen = _with_sentences(chosen, texts, options)
    run = run_chosen(chosen, **options)
    found = summarize_knockout(Store(run.store), run.run_id) if run.complete else None
    names = [f"{layer}.{head}" for layer, head in ranking]
    _warn(found.warnings if found else [])
    if as_json:
        parts = ("verdict", "warnings", "curve", "summary", "examples")
        told = {name: getattr(found, name) for name in parts} if found else {}
        print_json({**run_json(run), "ranking": names, **told})
    else:
        if found is not None:
            print_table(found.curve, title=_curve_title(chosen))
            print_table(found.summary, title="Where accuracy has halved, and the area to the controls")
            for sentence, rows in found.examples.items():
                print_table(rows, title=f"Likeliest next tokens of {sentence!r}")
            console.print(found.verdict, highlight=False)
            print_sql_hint(run.store, found.queries)
        print_run(run)
    _exit_unless_complete(run)


def _curve_title(scan: "Knockout") -> str:
    """What is replaced, where, and what counts as right."""
    edit = scan.parameters()
    where = "END" if edit["positions"] == "end" else "all tokens"
    return f"Accuracy (%), first k heads out ({edit['ablation']} ablation at {where}; right by {edit['scoring']})"


def _with_sentences(scan: "Knockout", texts: tuple[str, ...], options: dict[str, Any]) -> "Knockout":
    """The scan with the sentences to show, tokenized."""
    from mathinterp.models.catalog import ModelSpec, resolve

    names = ("model", "adapter", "dtype", "trust_remote_code")
    model = resolve(ModelSpec(*(options[name] for name in names)))
    sentences = tuple(_tokenize(text, model) for text in dict.fromkeys(texts))
    return replace(scan, sentences=sentences, tokenizer=model.tokenizer)


def _tokenize(text: str, model: "ResolvedModel") -> "Sentence":
    from mathinterp.experiments.knockout import Sentence
    from mathinterp.models.reading import check_readable

    tokenizer = model.tokenizer
    ids = tuple(tokenizer(text)["input_ids"])
    if not text.strip() or tokenizer.unk_token_id in ids:
        raise UserError(f"--show {text!r} has no words, or some that the model's tokenizer does not know")
    check_readable(f"--show {text!r}", ids, model)
    return Sentence(text, ids)


def _find_ranking(
    steps: int, rank_by: str, layers: str | None, edit: dict[str, Any], as_json: bool, options: dict[str, Any]
) -> None:
    from mathinterp.experiments.iterative import Iterative
    from mathinterp.experiments.thin_means import thin_mean_warnings
    from mathinterp.store import Store

    if (options["replicas"] or 1) != 1:
        raise UserError("--iterative runs on one replica: a step needs the head that the step before it masks")
    chosen = Iterative(**edit, steps=steps, rank_by=rank_by, layers=parse_layers(layers))
    chosen = replace(chosen, known=_finished_steps(chosen, options))
    run = run_chosen(chosen, **{**options, "replicas": 1})
    query = f"SELECT * FROM iterative_scan WHERE run_id = '{run.run_id}'"
    store = Store(run.store)
    rows = store.rows(
        f"""SELECT step, layer || '.' || head AS head, 100 * accuracy AS accuracy, 100 * (accuracy - accuracy_before)
               AS accuracy_change, logprob_change FROM ({query}) WHERE masked ORDER BY step"""
    )
    warnings = thin_mean_warnings(store, run.run_id)
    _warn(warnings)
    if as_json:
        ranking = [row["head"] for row in rows]
        print_json({**run_json(run), "ranking": ranking, "warnings": warnings, "steps": rows})
    else:
        print_table(
            rows, title=f"Heads masked one after another ({edit['ablation']} ablation, by {rank_by}; accuracy in %)"
        )
        print_sql_hint(run.store, [f"{query} ORDER BY step, accuracy"])
        if run.complete:
            console.print(f"  mathinterp knockout --rank-from {run.run_id}", highlight=False, soft_wrap=True)
        print_run(run)
    _exit_unless_complete(run)


def _finished_steps(scan: "Iterative", options: dict[str, Any]) -> Ranking:
    """The heads of the first steps that the store has already, if this command was stopped before."""
    from mathinterp.cluster.ray_cluster import connection, existing_cluster, gpus_each
    from mathinterp.cluster.run import prepare_work
    from mathinterp.models.catalog import ModelSpec
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store
    from mathinterp.store.manifest import run_id

    store = Store(options["store"])
    stopped = store.rows("SELECT run_id FROM runs WHERE scan = 'iterative' AND status <> 'finished'")
    if not stopped:
        return ()
    with ExitStack() as stack:
        if existing_cluster(options["address"]):
            stack.enter_context(connection(options["address"]))
        spec = ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code")))
        prompts = load_prompts(options["prompt_name"], seed=options["seed"], limit=options["limit"])
        work = prepare_work(scan, spec, prompts, on_gpu=gpus_each(options["gpus_per_replica"]) > 0, store=store)
    parameters = {**scan.parameters(), "dtype": work.model.dtype}
    run = run_id(scan.name, parameters, work.model.fingerprint, work.prompts_fingerprint)
    masked = store.rows(f"SELECT step, layer, head FROM iterative_scan WHERE run_id = '{run}' AND masked ORDER BY step")
    return tuple(Head(row["layer"], row["head"]) for step, row in enumerate(masked) if row["step"] == step)


def _warn(lines: list[str]) -> None:
    for line in lines:
        logger.warning(line)


def _exit_unless_complete(run: "RunSummary") -> None:
    if run.failed or not run.complete:
        sys.exit(1)
