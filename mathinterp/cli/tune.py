"""``mathinterp tune``: train chosen heads, or their controls, on a data set; merge an adapter into its base."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.group import Group
from mathinterp.cli.knockout import parse_ranking
from mathinterp.cli.options import out_folder, parse_layers, parse_neurons
from mathinterp.cli.output import console
from mathinterp.cli.prune import prune
from mathinterp.cli.sweep import sweep
from mathinterp.cli.tuning import resolve_base, say_whose_ranking, train, training_options
from mathinterp.cli.zero import zero
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape

Pairs = tuple[tuple[int, int], ...]
DEFAULT_TOP = 32


@click.group(cls=Group)
def tune() -> None:
    """Fine-tune chosen heads, whole models, layers or LoRA; merge an adapter.

    \b
    The course of training is in the table tuning_runs; the same command again resumes from the last checkpoint.
    Hyper-parameters that papers leave open are ours: AdamW, cosine, 3 % warm-up, no decay, loss on answers only.

    \b
    Example:
      mathinterp tune precise --heads 0.6,0.1 --data problems.jsonl --steps 200 --out tuned
    """


@tune.command()
@click.option("--heads", default=None, help="layer.head, for example 17.22,14.19.")
@click.option(
    "--heads-from", default=None, metavar="RUN_ID", help="The first heads of a head scan, path scan or masking."
)
@click.option("--heads-sql", default=None, metavar="SQL", help="Any query on the store that returns layer and head.")
@click.option(
    "--top", type=click.IntRange(min=1), default=None, help=f"So many heads of the ranking; default {DEFAULT_TOP}."
)
@click.option(
    "--control",
    default=None,
    help="Train others instead: random, random_layer (as many a layer), or bottom: the ranking's last, which "
    "under signed effects are those that help when they are out.",
)
@click.option("--control-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random heads.")
@click.option("--with-groups", is_flag=True, help="Grouped-query models: train the heads' k and v groups too.")
@click.option("--mlps", default=None, help="Also all MLP neurons of these layers, for example 12-14.")
@click.option("--neurons", default=None, help="Also these MLP neurons, layer.neuron.")
@click.option("--neurons-sql", default=None, metavar="SQL", help="Also those of a query that returns layer and neuron.")
@training_options(learning_rate=1e-4)
def precise(
    heads: str | None, heads_from: str | None, heads_sql: str | None, top: int | None, control: str | None,
    control_seed: int, with_groups: bool, mlps: str | None, neurons: str | None, neurons_sql: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Train chosen heads only (paper B). Gives a plain PEFT adapter.

    A head's q, k, v rows and o columns train; with grouped queries its q rows and o columns. Biases stay.

    \b
    Examples:
      mathinterp tune precise --heads 0.6,0.1 --data signed_two_digit_train --steps 100 --out tuned
      mathinterp tune precise --heads-from RUN_ID --top 8 --data train.jsonl --held-out test.jsonl --out tuned
      mathinterp tune precise --heads-from RUN_ID --top 8 --control random --data train.jsonl --out random
    """
    from mathinterp.tuning.precise import PreciseJob, Selection, heads_that_move_along

    resolved = resolve_base(options)
    if heads is not None and top is not None:
        raise UserError("--top takes the first of a ranking (--heads-from, --heads-sql); with --heads leave it out")
    ranking = _ranking(heads, heads_from, heads_sql, options["store"])
    chosen = ranking if heads is not None or (heads_sql is not None and top is None) else ranking[: top or DEFAULT_TOP]
    wanted = top if heads_from is None else top or DEFAULT_TOP
    if len(chosen) < (wanted or 0):
        raise UserError(f"--top {wanted}: the ranking has only {len(chosen)} heads; give --top {len(chosen)}")
    if control is not None:
        chosen = _control(control, chosen, ranking, resolved.shape, control_seed, _key_heads(heads_from, options))
    selection = Selection(
        chosen, _neurons(neurons, neurons_sql, options["store"]), parse_layers(mlps, "--mlps") or (), with_groups
    )
    drawn = control if control in (None, "bottom") else f"{control} heads, seed {control_seed}"
    job = PreciseJob(selection, drawn)
    job.check(resolved.shape)
    if heads_from is not None:
        say_whose_ranking(options["store"], heads_from, resolved)
    if chosen:
        click.echo(f"heads that train: {_names(chosen)}", err=True)
    if with_groups and (moved := heads_that_move_along(resolved.shape, chosen)):
        click.echo(f"they share keys and values with {_names(moved)}, which move along", err=True)
    train(job, resolved, options, heads_sql if heads_from is None else f"run {heads_from}")


@tune.command()
@click.option(
    "--layers", default=None, help="These layers whole and nothing else, for example 12-17; default all weights."
)
@training_options(learning_rate=2e-5)
def full(layers: str | None, **options: Any) -> None:
    """Train all weights, or all weights of some layers. Gives a model folder.

    Weights and AdamW are float32 unless --dtype says bfloat16, which takes half the memory and loses small updates.

    \b
    Examples:
      mathinterp tune full --data signed_two_digit_train --epochs 1 --out tuned
      mathinterp tune full --layers 2-3 --data train.jsonl --steps 100 --out layers
    """
    from mathinterp.tuning.controls import FullJob

    if options["dtype"] == "auto":
        options["dtype"] = "float32"
    train(FullJob(parse_layers(layers)), resolve_base(options), options)


@tune.command()
@click.option(
    "--rank", type=click.IntRange(min=1), default=16, show_default=True, help="Rank of each module's adapter."
)
@click.option("--alpha", type=click.IntRange(min=1), default=None, help="Default: twice the rank.")
@click.option("--targets", default="all", show_default=True, help="attention, mlp or all linear modules.")
@click.option("--layers", default=None, help="Only these layers, for example 9 or 0-3; default all.")
@training_options(learning_rate=2e-4)
def lora(rank: int, alpha: int | None, targets: str, layers: str | None, **options: Any) -> None:
    """Train an ordinary LoRA adapter.

    \b
    Example:
      mathinterp tune lora --rank 16 --data signed_two_digit_train --epochs 1 --out adapter
    """
    from mathinterp.tuning.controls import LoraJob

    job = LoraJob(rank, 2 * rank if alpha is None else alpha, targets, parse_layers(layers))
    train(job, resolve_base(options), options)


@tune.command()
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), callback=out_folder, help="Folder for the merged model."
)
@click.option("--model", default="bundled", show_default=True, help="The adapter's base.")
@click.option("--dtype", default="auto", show_default=True, help="Of the merged weights; auto is float32.")
def merge(adapter: Path, out: Path, model: str, dtype: str) -> None:
    """Add an adapter's update to its base and write the model as a Hugging Face folder.

    \b
    Example:
      mathinterp tune merge tuned --model bundled --out merged
    """
    from mathinterp.models.catalog import ModelSpec, load, resolve
    from mathinterp.tuning.controls import save_model
    from mathinterp.tuning.edit import check_free, written_whole
    from mathinterp.tuning.sft_ray import ABOUT_FILE, check_base

    check_free(out)
    check_base(adapter, resolve(ModelSpec(model)).fingerprint)
    loaded = load(ModelSpec(model, str(adapter), dtype), "cpu")
    with written_whole(out) as part:
        save_model(loaded.model, loaded.tokenizer, part)
        if (adapter / ABOUT_FILE).is_file():
            (part / ABOUT_FILE).write_bytes((adapter / ABOUT_FILE).read_bytes())
    console.print(f"The merged model ({loaded.dtype}) is in {out}", highlight=False, soft_wrap=True)


def _ranking(heads: str | None, heads_from: str | None, heads_sql: str | None, store: str) -> Pairs:
    """The heads in the order given or found; empty if none are asked for."""
    from mathinterp.experiments.knockout.summary import ranking_from
    from mathinterp.store import Store

    if sum(value is not None for value in (heads, heads_from, heads_sql)) > 1:
        raise UserError("give the heads in one way: --heads, --heads-from or --heads-sql")
    if heads is not None:
        return parse_ranking(heads)
    if heads_from is not None:
        return ranking_from(Store(store), heads_from)
    return () if heads_sql is None else _pairs_of("--heads-sql", heads_sql, "head", store)


def _pairs_of(option: str, sql: str, unit: str, store: str) -> Pairs:
    """Layer and head (neuron) of every row that a query on the store returns."""
    from mathinterp.store import Store

    rows = Store(store).rows(sql)
    if not rows:
        raise UserError(f"{option} returns no rows")
    if not all(isinstance(row.get(name), int) for row in rows for name in ("layer", unit)):
        raise UserError(f"{option} must return whole numbers layer and {unit}; it returns {', '.join(rows[0])}")
    return tuple((row["layer"], row[unit]) for row in rows)


def _key_heads(heads_from: str | None, options: dict[str, Any]) -> Pairs:
    from mathinterp.experiments.knockout.summary import key_heads_from
    from mathinterp.store import Store

    return () if heads_from is None else key_heads_from(Store(options["store"]), heads_from)


def _control(kind: str, key: Pairs, ranking: Pairs, shape: "ModelShape", seed: int, never: Pairs) -> Pairs:
    from mathinterp.tuning.controls import control_heads

    return tuple(control_heads(kind, key, ranking, shape, seed, never))


def _neurons(text: str | None, sql: str | None, store: str) -> Pairs:
    if text is not None and sql is not None:
        raise UserError("give the neurons in one way: --neurons or --neurons-sql")
    if sql is not None:
        return _pairs_of("--neurons-sql", sql, "neuron", store)
    return () if text is None else parse_neurons(text)


def _names(heads: "Pairs | list[tuple[int, int]]") -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


for command in (sweep, prune, zero):
    tune.add_command(command)
