"""Train the bundled arithmetic model.

One GPU, some minutes (the weights in the package: 11,743 steps):
    python -m recipes.train_bundled --out bundled
CPU, a small and weaker model for a look:
    python -m recipes.train_bundled --out small --steps 300 --batch 64
A cluster:
    ray job submit --working-dir . -- python -m recipes.train_bundled --out /shared/bundled --storage s3://bucket/training

A folder with random weights is written first; then it is a full fine-tuning like any other. The course of training is
in the table tuning_runs; the same command again resumes.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from mathinterp.local_files import whole_folder
from mathinterp.models.catalog import ModelSpec
from mathinterp.tuning.controls import FullJob, save_model
from mathinterp.tuning.folders import TUNING_FILE, check_free
from recipes.accuracy import Accuracy, accuracy_table, as_markdown
from recipes.bundled import build_tokenizer, bundled_config
from recipes.cards import bundled_card
from recipes.examples import BUNDLED_MIXTURE
from recipes.fresh import Plan, train_fresh
from recipes.options import recipe_options, say


@dataclass(frozen=True)
class Shape:
    """Of the model."""

    layers: int = 8
    heads: int = 8
    d_model: int = 256
    d_ff: int = 608


def train_bundled(plan: Plan, out: Path, shape: Shape = Shape(), prompts_per_cell: int = 1000) -> list[Accuracy]:
    """Train the model, or resume that, and leave it in bfloat16, with its card, in ``out``; returns its accuracies."""
    work = out.with_name(out.name + "-training")
    if not (work / "untrained").is_dir():
        write_untrained(work / "untrained", shape, plan.seed)
    spec = ModelSpec(str(work / "untrained"), dtype="float32")
    trained = train_fresh(FullJob(), spec, BUNDLED_MIXTURE, plan, work / "trained", say)
    if not (out / TUNING_FILE).is_file():
        check_free(out)
    return write_bundled(trained.out, trained.about, out, prompts_per_cell)


def write_untrained(folder: Path, shape: Shape, seed: int) -> None:
    """A randomly initialised Llama in float32, and its tokenizer."""
    torch.manual_seed(seed)
    names = {each.name: getattr(shape, each.name) for each in fields(shape)}
    with whole_folder(folder) as part:
        save_model(LlamaForCausalLM(bundled_config(**names)), build_tokenizer(), part)


def write_bundled(trained: Path, about: dict[str, Any], out: Path, prompts_per_cell: int) -> list[Accuracy]:
    """The trained model in bfloat16 with its card; accuracies are of those weights, computed in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    tokenizer = build_tokenizer()
    with whole_folder(out) as part:
        save_model(model, tokenizer, part)
        saved: PreTrainedModel = AutoModelForCausalLM.from_pretrained(part, dtype=torch.float32)
        table = accuracy_table(saved, tokenizer, prompts_per_cell=prompts_per_cell)
        (part / TUNING_FILE).write_bytes((trained / TUNING_FILE).read_bytes())
        (part / "README.md").write_text(bundled_card(saved, about, BUNDLED_MIXTURE, table), encoding="utf-8")
    return table


@click.command(help="\b\n" + str(__doc__).replace("\n\n", "\n\n\b\n"))  # \b: keep the lines as they are
@recipe_options(steps=11_743, batch=1024, lr=1e-3)
def main(out: Path, **options: Any) -> None:
    table = train_bundled(Plan(**options), out)
    click.echo(as_markdown(table))
    click.echo(f"the model and its card are in {out}")


if __name__ == "__main__":
    main()
