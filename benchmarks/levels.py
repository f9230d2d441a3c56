"""How long does a question take when its model lies on the card, in host memory, on disk?

    python benchmarks/levels.py                            # a tiny model, on a CPU: memory and disk
    python benchmarks/levels.py --shape llama-2-7b         # on a GPU, with 60 GB of host memory: all three

One warm service (`mathinterp serve start`) with room for one model on the card and for two in host memory (on a CPU for
two in all), and four models of one shape with random weights. Each is asked when the service's status says that it is
where it is wanted: `ablate`, heads of the first layer (five, or all that there are) x 20 prompts, other prompts each
time. Two models take turns from memory: the first such questions wait until the other model was copied there, the later
ones find its copy (the median). From disk all four take turns; for random weights that means that they are made anew.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import click
import torch

import mathinterp as mi
from benchmarks.service import HEADS, prompts, service
from mathinterp.connected import Service
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.service.shelf import CARD, DISK, MEMORY, expected_bytes

LIMIT = 20  # prompts
NOWHERE = "nowhere"  # of a model that was not asked about yet


class Asked:
    """A service that is asked about models by name, and the seconds of each answer by the level that it came from."""

    def __init__(self, client: Service, heads: int):
        self.client = client
        self.heads = [f"0.{head}" for head in range(min(HEADS, heads))]
        self.seconds: dict[str, list[float]] = {}
        self._questions = 0

    def level(self, model: str) -> str:
        """Where the service's one process has it, by its status."""
        found = [row["level"] for row in self.client.status()["models"] if row["model"] == model]
        return found[0] if found else NOWHERE

    def ask(self, model: str, expected: str) -> None:
        """A new question about a model that must lie on this level."""
        level = self.level(model)
        if level != expected:
            raise RuntimeError(f"{model} is on the level {level}, not {expected}")
        self._questions += 1
        given = prompts(LIMIT, self._questions)
        started = time.perf_counter()
        answer = self.client.ablate(model, given, heads=self.heads)
        seconds = time.perf_counter() - started
        assert len(answer.rows) > 0
        self.seconds.setdefault(level, []).append(seconds)


def rounds(asked: Asked, models: Sequence[str], on_gpu: bool, repeats: int) -> None:
    """Questions from each level."""
    first, second, *_ = models
    asked.ask(first, NOWHERE)
    asked.ask(second, NOWHERE)
    for _ in range(repeats):
        asked.ask(first, MEMORY)
        asked.ask(second, MEMORY)
        asked.ask(second, CARD if on_gpu else MEMORY)
    for model in models[2:]:
        asked.ask(model, NOWHERE)
    for model in models:
        asked.ask(model, DISK)


def levels(shape: str, repeats: int) -> dict[str, Any]:
    """Median and most seconds for each level, and what there was."""
    on_gpu = torch.cuda.is_available()
    models = [f"random:{shape}", *(f"random:{shape}:{seed}" for seed in (1, 2, 3))]
    resolved = resolve(ModelSpec(models[0]), "cuda" if on_gpu else "cpu")
    size = expected_bytes(resolved)
    room = ["--memory-gb", f"{2.5 * size / 1e9:.6f}"]
    if on_gpu:
        room += ["--card-gb", f"{1.5 * size / 1e9:.6f}"]
    with tempfile.TemporaryDirectory() as folder, service(folder, 1, *room) as (url, _, started):
        asked = Asked(mi.connect(url), resolved.shape.n_heads)
        rounds(asked, models, on_gpu, repeats)
    found = {
        level: {"questions": len(each), "median": statistics.median(each), "most": max(each), "each": each}
        for level, each in asked.seconds.items()
    }
    return {"shape": shape, "gb": size / 1e9, "on_gpu": on_gpu, "service start": started, "seconds": found}


@click.command()
@click.option("--shape", default="llama-tiny", show_default=True, help="A shape of 'mathinterp models'.")
@click.option("--repeats", default=3, show_default=True, help="Rounds through the two models in memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(shape: str, repeats: int, as_json: bool) -> None:
    """Start, ask, print, stop."""
    found = levels(shape, repeats)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{shape}, {found['gb']:.3g} GB of weights; {LIMIT} prompts, from question to answer")
    for level in (CARD, MEMORY, DISK, NOWHERE):
        if level in found["seconds"]:
            each = found["seconds"][level]
            click.echo(f"{level:7} {each['median']:7.2f} s (median of {each['questions']}; most {each['most']:.2f})")


if __name__ == "__main__":
    main()
