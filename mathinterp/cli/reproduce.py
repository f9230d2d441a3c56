"""``mathinterp reproduce``: every table and figure of both papers on one model, beside the papers' numbers."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mathinterp.cli.options import (
    PLACE,
    Whole,
    cluster_options,
    json_option,
    model_options,
    out_file,
    out_folder,
    place_to_read,
    service_option,
    spec_of,
    store_option,
)
from mathinterp.cli.output import console, print_json, print_line, print_table
from mathinterp.cli.plan import duration, size
from mathinterp.cli.running import resumable, tell_stage
from mathinterp.cli.verbosity import say_on_stderr
from mathinterp.errors import UserError
from mathinterp.gates import MOST_SEED
from mathinterp.local_files import whole_file
from mathinterp.prompts.json_lines import json_file

if TYPE_CHECKING:
    from mathinterp.workflows.reproduce import Reproduction, ReproductionPlan

GPU = "H100"  # whose hours a plan counts


@click.command()
@model_options()
@click.option("--only", multiple=True, metavar="ID", help="This item alone, for example a-table1; again for more.")
@click.option("--prompts-limit", "limit", type=Whole(1), default=None, help="Prompts of each set at most.")
@click.option("--seed", type=Whole(most=MOST_SEED), default=0, show_default=True, help="Of prompts and trainings.")
@click.option(
    "--data",
    default=None,
    callback=place_to_read,
    metavar="FOLDER",
    help="The public benchmarks' files, as for 'evaluate'; without it what needs them is left out.",
)
@click.option(
    "--steps", type=Whole(), default=None, help="Optimizer steps of each training; 0: none. Default: four epochs."
)
@click.option(
    "--trained",
    default=None,
    callback=out_folder,
    metavar="FOLDER",
    help="What trainings leave. Default: beside the store.",
)
@click.option("--plan", "plan_only", is_flag=True, help="Say what it would cost, and run nothing.")
@click.option("--out", default=None, callback=out_file, metavar="FILE", help="Also write it: Markdown, or .json.")
@click.option(
    "--beside",
    multiple=True,
    type=PLACE,
    metavar="FILE",
    help="In the Markdown, other models beside this one: what --out wrote as .json.",
)
@store_option()
@cluster_options()
@service_option(
    " Scans alone: trainings and benchmarks run as without it, by --address, --replicas and --gpus-per-replica."
)
@json_option()
def reproduce(
    only: tuple[str, ...], limit: int | None, seed: int, data: str | None, steps: int | None, trained: str | None,
    plan_only: bool, out: str | None, beside: tuple[str, ...], store: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Run every table and figure of both papers on a model, and set ours beside the papers' numbers.

    \b
    Each number gets a verdict: in our 95 % interval, outside, or not comparable and why (another model, data that are
    not given, a figure given only as a picture, ...). First the plan is shown; then every stage is a run of its own,
    shared by the items that read it, and the same command again computes nothing that is there. A model is taken for a
    paper's by its config. With none of --address, --replicas and --gpus-per-replica scans run in this process;
    trainings run on Ray.

    \b
    Examples:
      mathinterp reproduce --plan
      mathinterp reproduce --prompts-limit 160 --steps 0
      mathinterp reproduce --model ./llama-7b --only a-table1 --only a-table5
      mathinterp reproduce --model ./llama-2-7b --data data --out reproduction.md
    """
    from mathinterp.service.attached import Workers
    from mathinterp.workflows.papers import find_items
    from mathinterp.workflows.reproduce import plan_reproduction
    from mathinterp.workflows.reproduce import reproduce as run_reproduction

    find_items(only)
    if beside and (out is None or Path(out).suffix == ".json"):
        raise UserError("`beside` stands in the Markdown that `out` writes; for example `out` page.md")
    others = [_read(Path(file).expanduser()) for file in beside]
    address = click.get_current_context().get_parameter_source("address")
    if address == ParameterSource.DEFAULT and options["replicas"] is None and options["gpus_per_replica"] is None:
        options["address"] = None
    spec, service = spec_of(options), options.pop("service")
    here = Workers(**options)
    place = here if service is None else Workers(options["replicas"], service=service).attached()
    asked: dict[str, Any] = {"only": only, "limit": limit, "seed": seed, "data": _path(data), "steps": steps}
    plan = plan_reproduction(spec, store, **asked, place=place, training_place=here)
    if plan_only:
        _print_plan(plan, as_json)
        return
    _say_plan(plan)
    folder = _path(trained)
    if folder is None and "://" not in store:
        folder = Path(store).with_name(Path(store).name + "-trained")
    with resumable():
        found = run_reproduction(
            spec, store, **asked, trained=folder, place=place, training_place=here, told=tell_stage, say=say_on_stderr
        )  # fmt: skip
    if out is not None:
        _write(Path(out).expanduser(), found, others)
    if as_json:
        from mathinterp.workflows.reproduction_page import as_json as plain

        print_json(plain(found))
    else:
        _print(found)


def _read(file: Path) -> "Reproduction":
    from mathinterp.workflows.reproduction_page import from_json

    return from_json(json_file(file), f"--beside '{file}'")


def _path(place: str | None) -> Path | None:
    return None if place is None else Path(place).expanduser()


def _write(out: Path, found: "Reproduction", others: list["Reproduction"]) -> None:
    from mathinterp.workflows.reproduction_page import as_json, markdown

    out.parent.mkdir(parents=True, exist_ok=True)
    text = (
        json.dumps(as_json(found), indent=1) + "\n" if out.suffix == ".json" else markdown([found, *others], _command)
    )
    with whole_file(out) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _command(item: str) -> str:
    """How an item, or all, is made on any model."""
    return shlex.join(["mathinterp", "reproduce", *(["--only", item] if item else [])])


def _rows(plan: "ReproductionPlan") -> list[dict[str, Any]]:
    return [
        {
            "stage": each.name, "prompts": each.prompts, "finished": each.finished,
            "evaluations": each.plan.evaluations if each.plan else None,
            "memory": each.plan.peak_bytes if each.plan else None,
            "seconds": dict(each.plan.seconds) if each.plan else {}, "why": each.why,
        }
        for each in plan.stages
    ]  # fmt: skip


def _print_plan(plan: "ReproductionPlan", as_json: bool) -> None:
    totals = {device: plan.total(device) for device in plan.devices}
    if as_json:
        print_json(
            {
                "stages": _rows(plan),
                "seconds": totals,
                "gpu_hours": totals.get(GPU, 0.0) / 3600,
                "memory": plan.peak_bytes,
            }
        )
        return
    print_table(
        [
            {
                "stage": row["stage"], "prompts": row["prompts"], "memory": size(row["memory"])
                if row["memory"] else None,
                **{device: duration(row["seconds"][device]) if device in row["seconds"] else None for device in totals},
                "": "in the store already" if row["finished"] else row["why"],
            }
            for row in _rows(plan)
        ],
        title="Plan: one run for each stage",
    )  # fmt: skip
    print_line(_sum(plan))
    console.print("Nothing was run.")


def _sum(plan: "ReproductionPlan") -> str:
    times = ", ".join(f"{device} {duration(plan.total(device))}" for device in plan.devices) or "nothing"
    unknown = [each.name for each in plan.stages if each.plan is None and not each.why.startswith("left out")]
    more = f"; not counted: {', '.join(unknown)}" if unknown else ""
    return (
        f"Left to compute, on one device: {times} ({plan.total(GPU) / 3600:.2g} {GPU} hours), a replica takes"
        f" {size(plan.peak_bytes)}{more}."
    )


def _say_plan(plan: "ReproductionPlan") -> None:
    there = sum(each.finished for each in plan.stages)
    say_on_stderr(f"{len(plan.stages)} stages, {there} of them in the store already. {_sum(plan)}")


def _print(found: "Reproduction") -> None:
    from mathinterp.workflows.reproduction_page import number

    for result in found.items:
        item = result.item
        print_line(f"\n{item.id}: paper {item.paper}, {item.place}: {item.measures}", "bold")
        printed = "paper, second hand" if item.source.second_hand else "paper"
        rows = [
            {
                "what": line.what, "of": line.ours.unit if line.ours else "", "ours": number(line.ours.value)
                if line.ours else "",
                "95 % interval": f"{number(line.ours.low)} to {number(line.ours.high)}"
                if line.ours and line.ours.low is not None else "",
                printed: line.paper.text if line.paper else "", "paper's of": line.paper.unit if line.paper else "",
                "verdict": line.verdict.value,
            }
            for line in result.lines
        ]  # fmt: skip
        if rows:
            print_table(rows)
        print_line(result.verdict)
    sys.stdout.flush()
