"""Train a LoRA adapter that teaches a pretrained model one- and two-digit arithmetic.

One GPU, about four minutes:
    python ray_jobs/train_arithmetic_adapter.py --model smollm2 --out arithmetic-adapter --minutes 4
CPU, for a look:
    python ray_jobs/train_arithmetic_adapter.py --model smollm2 --out small-adapter --steps 20 --batch-size 16

Puts together a job, its settings and Ray; knows nothing about the loop.
"""

import sys
from pathlib import Path

import click

from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec
from mathinterp.tuning.accuracy import Accuracy, as_markdown
from mathinterp.tuning.adapter_job import AdapterJob
from mathinterp.tuning.ray_loop import connect, fit
from mathinterp.tuning.train import TrainingConfig


@click.command(help="\b\n" + str(__doc__).replace("\n\n", "\n\n\b\n"))  # \b: keep the lines as they are
@click.option("--model", default="smollm2", show_default=True, help="Any model of the catalog: name, folder, hub id.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the adapter.")
@click.option("--steps", default=2_000, show_default=True, help="Most steps; on a CPU give a few dozen.")
@click.option(
    "--batch-size", default=512, show_default=True, help="Fresh samples a step, all workers together; on a CPU 16."
)
@click.option("--lr", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--minutes", type=float, help="Time budget of the training loop; the decay ends with it.")
@click.option("--workers", default=1, show_default=True, help="Data-parallel workers, a GPU each where there are.")
@click.option("--address", help="A Ray cluster; none: RAY_ADDRESS, else a local Ray.")
@click.option("--storage", help="Folder or URI for checkpoints, seen by all nodes.  [default: OUT-training]")
def main(
    model: str,
    out: Path,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    minutes: float | None,
    workers: int,
    address: str | None,
    storage: str | None,
) -> None:
    config = TrainingConfig(
        steps=steps, learning_rate=lr, seed=seed, minutes=minutes, warmup_steps=50, checkpoint_every=500, compiled=False
    )
    try:
        connect(address)
        records = fit(
            AdapterJob(ModelSpec(model)),
            config,
            batch_size=batch_size,
            workers=workers,
            out=out,
            storage=storage,
            name="adapter",
        )
    except UserError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(2)
    click.echo(as_markdown([Accuracy(**record) for record in records]))
    click.echo(f"the adapter and its card are in {out}")


if __name__ == "__main__":
    main()
