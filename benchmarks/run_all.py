"""Run every benchmark and keep its figures: `python benchmarks/run_all.py [NAME ...] [-- OPTIONS OF EACH]`.

A result is one JSON line, appended to benchmarks/results/NAME.jsonl: what the benchmark printed last, when, on what
machine, and at which commit. docs/log.md cites these lines. On a GPU, for example:
`python benchmarks/run_all.py head_scan path_scan -- --model random:llama-2-7b`.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "head_scan": (),
    "adaptive_scan": (),
    "path_scan": (),
    "league": (),
    "operand_map": (),
    "neuron_scan": (),
    "concept_scan": (),
    "sft": (),
    "sql": ("--json",),
    "stability": ("--json",),
    "dispatch": ("--json",),
    "coverage": ("--json",),
    "adaptive_orders": ("--json",),
    "store_growth": ("--json",),
    "split_model": (),
    "split_scans": (),
    "tensor_parallel": (),
    "sharded_sft": (),
    "faults": ("--json",),
    "service": ("--json",),
    "levels": ("--json",),
    "quantised": (),
}  # name -> options that make it print JSON


@click.command()
@click.argument("names", nargs=-1)
@click.option("--results", type=click.Path(path_type=Path), default=FOLDER / "results", help="Folder of the lines.")
def main(names: tuple[str, ...], results: Path) -> None:
    """Run the benchmarks NAMES (all of them by default); words after -- go to each of them."""
    chosen, options = _split(names)
    for name in chosen or BENCHMARKS:
        if name not in BENCHMARKS:
            raise click.UsageError(f"there is no benchmark '{name}'; there are {', '.join(BENCHMARKS)}")
    for name in chosen or BENCHMARKS:
        click.echo(f"== {name}")
        figures = figures_of(name, options)
        results.mkdir(parents=True, exist_ok=True)
        with (results / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**circumstances(), "options": options, "figures": figures}) + "\n")


def _split(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names, then options: click takes the first -- away, so the first word with a dash begins the options."""
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def figures_of(name: str, options: list[str]) -> dict[str, Any]:
    """Run one benchmark, show what it prints, and return the JSON object of its last line."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *BENCHMARKS[name], *options]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            click.echo(line, nl=False)
            lines.append(line)
    if running.returncode:
        raise click.ClickException(f"{name} failed with exit code {running.returncode}")
    figures = json.loads(lines[-1])
    assert isinstance(figures, dict), f"{name} printed no JSON object last"
    return figures


def circumstances() -> dict[str, Any]:
    """When, at which commit and on what machine."""
    import torch

    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())],
        "torch": torch.__version__,
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
