"""Train the bundled arithmetic model.

One GPU, about five minutes (the recipe of the weights in the package):
    python ray_jobs/train_bundled.py --out bundled --minutes 5
CPU, a small and weaker model for a look:
    python ray_jobs/train_bundled.py --out small --steps 300 --batch-size 64
A cluster:
    ray job submit --working-dir . -- python ray_jobs/train_bundled.py --out bundled --storage s3://bucket/training

Puts together a job, its settings and Ray; knows nothing about the loop.
"""

import sys
from pathlib import Path

import click

from mathinterp.errors import UserError
from mathinterp.tuning.accuracy import Accuracy, as_markdown
from mathinterp.tuning.jobs import BundledJob
from mathinterp.tuning.ray_loop import connect, fit
from mathinterp.tuning.train import TrainingConfig


@click.command(help="\b\n" + str(__doc__).replace("\n\n", "\n\n\b\n"))  # \b: keep the lines as they are
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the model.")
@click.option("--steps", default=12_000, show_default=True, help="Most steps; on a CPU give a few hundred.")
@click.option(
    "--batch-size", default=1024, show_default=True, help="Fresh samples a step, all workers together; on a CPU 64."
)
@click.option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--minutes", type=float, help="Time budget of the training loop; the decay ends with it.")
@click.option("--workers", default=1, show_default=True, help="Data-parallel workers, a GPU each where there are.")
@click.option("--address", help="A Ray cluster; none: RAY_ADDRESS, else a local Ray.")
@click.option("--storage", help="Folder or URI for checkpoints, seen by all nodes.  [default: OUT-training]")
def main(
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
    config = TrainingConfig(steps=steps, learning_rate=lr, seed=seed, minutes=minutes)
    try:
        connect(address)
        records = fit(
            BundledJob(), config, batch_size=batch_size, workers=workers, out=out, storage=storage, name="bundled"
        )
    except UserError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(2)
    click.echo(as_markdown([Accuracy(**record) for record in records]))
    click.echo(f"the model and its card are in {out}")


if __name__ == "__main__":
    main()
