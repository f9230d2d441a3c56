"""Train a LoRA adapter that teaches a pretrained model one- and two-digit arithmetic.

One GPU, some minutes (the adapter in the package: 761 steps):
    python -m recipes.train_arithmetic_adapter --model smollm2 --out arithmetic-adapter
CPU, for a look:
    python -m recipes.train_arithmetic_adapter --model smollm2 --out small-adapter --steps 20 --batch 16

A LoRA fine-tuning like any other, on sentences drawn afresh. The course of training is in the table tuning_runs; the
same command again resumes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file

from mathinterp.local_files import whole_folder
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.folders import TUNING_FILE, check_free
from recipes.accuracy import Accuracy, accuracy_table, as_markdown
from recipes.cards import adapter_card
from recipes.examples import ADAPTER_MIXTURE, CELLS
from recipes.fresh import Plan, train_fresh
from recipes.options import recipe_options, say

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
JOB = LoraJob(rank=16, alpha=32, targets="all")
TAUGHT = [cell for cell in CELLS if cell.form != "words" and cell.digits < 3]


def train_adapter(spec: ModelSpec, plan: Plan, out: Path, prompts_per_cell: int = 500) -> list[Accuracy]:
    """Train the adapter, or resume that, and leave it in bfloat16, with its card, in ``out``; returns accuracies."""
    work = out.with_name(out.name + "-training")
    trained = train_fresh(JOB, spec, ADAPTER_MIXTURE, plan, work / "trained", say)
    if not (out / TUNING_FILE).is_file():
        check_free(out)
    return write_adapter(spec, trained.out, trained.about, out, prompts_per_cell)


def write_adapter(
    spec: ModelSpec, trained: Path, about: dict[str, Any], out: Path, prompts_per_cell: int
) -> list[Accuracy]:
    """A PEFT folder in bfloat16; accuracies are of the base with that adapter as the catalog loads them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with whole_folder(out) as part:
        weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(trained / WEIGHTS).items()}
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        for name in (CONFIG, TUNING_FILE):
            (part / name).write_bytes((trained / name).read_bytes())
        saved = load(replace(spec, adapter=str(part)), device)
        table = accuracy_table(saved.model, saved.tokenizer, cells=TAUGHT, prompts_per_cell=prompts_per_cell)
        card = adapter_card(spec.label, JOB.rank, JOB.alpha, saved.dtype, about, ADAPTER_MIXTURE, table)
        (part / "README.md").write_text(card, encoding="utf-8")
    return table


@click.command(help="\b\n" + str(__doc__).replace("\n\n", "\n\n\b\n"))  # \b: keep the lines as they are
@click.option("--model", default="smollm2", show_default=True, help="Any model of the catalog: name, folder, hub id.")
@recipe_options(steps=761, batch=512, lr=2e-3)
def main(model: str, out: Path, **options: Any) -> None:
    plan = Plan(**options, warmup=50, checkpoint_every=500)
    click.echo(as_markdown(train_adapter(ModelSpec(model), plan, out)))
    click.echo(f"the adapter and its card are in {out}")


if __name__ == "__main__":
    main()
