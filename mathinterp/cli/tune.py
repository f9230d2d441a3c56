"""``mathinterp tune``: train chosen heads, or their controls, on a data set; merge an adapter into its base."""

from pathlib import Path
from typing import Any

import click

from mathinterp.cli.group import Group
from mathinterp.cli.options import PLACE, Whole, fields_of, out_folder, place_to_read
from mathinterp.cli.output import print_line
from mathinterp.cli.prune import prune
from mathinterp.cli.sweep import sweep
from mathinterp.cli.tuning import options_for, say, train, training_options
from mathinterp.cli.zero import zero
from mathinterp.experiments.options import read_layers
from mathinterp.tuning.settings import Choice


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
@options_for(Choice)
@training_options(learning_rate=1e-4)
def precise(**options: Any) -> None:
    """Train chosen heads only (paper B). Gives a plain PEFT adapter.

    A head's q, k, v rows and o columns train; with grouped queries its q rows and o columns. Biases stay.

    \b
    Examples:
      mathinterp tune precise --heads 0.6,0.1 --data signed_two_digit_train --steps 100 --out tuned
      mathinterp tune precise --from RUN_ID --top 8 --data train.jsonl --held-out test.jsonl --out tuned
      mathinterp tune precise --from RUN_ID --top 8 --control random --data train.jsonl --out random
    """
    from mathinterp.tuning.chosen import precise_job

    choice = fields_of(Choice, options)
    train(lambda base, store: precise_job(choice, base, store, say), options, choice.chosen_from)


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

    chosen = read_layers(layers)
    train(lambda base, store: FullJob(chosen), options, dtype="float32")


@tune.command()
@click.option("--rank", type=Whole(1), default=16, show_default=True, help="Rank of each module's adapter.")
@click.option("--alpha", type=Whole(1), default=None, help="Default: twice the rank.")
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

    job = LoraJob(rank, 2 * rank if alpha is None else alpha, targets, read_layers(layers))
    train(lambda base, store: job, options)


@tune.command()
@click.argument("adapter", type=PLACE)
@click.option("--out", required=True, type=PLACE, callback=out_folder, help="Folder for the merged model.")
@click.option("--model", default="bundled", show_default=True, callback=place_to_read, help="The adapter's base.")
@click.option("--dtype", default="auto", show_default=True, help="Of the merged weights; auto is float32.")
def merge(adapter: Path, out: Path, model: str, dtype: str) -> None:
    """Add an adapter's update to its base and write the model as a Hugging Face folder.

    \b
    Example:
      mathinterp tune merge tuned --model bundled --out merged
    """
    from mathinterp.models.spec import ModelSpec
    from mathinterp.tuning import edit

    merged = edit.merge(adapter, ModelSpec(model, None, dtype), out, say)
    print_line(f"The merged model ({merged}) is in {out}")


for command in (sweep, prune, zero):
    tune.add_command(command)
