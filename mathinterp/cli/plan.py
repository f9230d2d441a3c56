"""``mathinterp plan``: what an experiment costs, before anything loads.

Each command under it takes the options of the experiment it plans.
"""

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.chain import sentence_command
from mathinterp.cli.experiment import ExperimentGroup, parse
from mathinterp.cli.options import given_here, spec_of
from mathinterp.cli.output import console, print_json, print_line, print_table
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.cluster.plan import Plan
    from mathinterp.experiments import Experiment
    from mathinterp.prompts.prompt import Prompt

WORKFLOWS = {  # what runs in several steps, each of which decides the next; or a step -> the command that runs it
    "pipeline": "pipeline",
    "edit": "edit",
    "gender_neurons": "edit",
    "evaluate": "evaluate",
    "sweep": "tune sweep",
    "lora_sweep": "tune sweep",
    "sweep_neurons": "tune sweep",
    "prune": "tune prune",
    "concept_zeroing": "scan concepts",
}
PER_DEVICE = ("model_bytes", "cache_bytes", "peak_bytes", "seconds")  # fields of a Plan that depend on the dtype


def plan_experiment(experiment: "type[Experiment]", *, sentence: "Prompt | None" = None, **options: Any) -> None:
    """Print what the experiment would cost with these options; loads no weights and needs no Ray."""
    chosen, _, as_json, _ = parse(experiment, options)
    from mathinterp.cluster.plan import UPPER_BOUND, measure_cpu, plan_scan
    from mathinterp.cluster.run import prepare_work
    from mathinterp.models.catalog import resolve_dtype
    from mathinterp.prompts import Prompts, prompts_of
    from mathinterp.store import Store

    spec = spec_of(options)
    prompts = Prompts(())
    if sentence is not None:
        prompts = Prompts((sentence,), sentence.text)
    elif experiment.prompt_set is not None:
        limit = options["limit"] if experiment.prompts_needed is None else experiment.prompts_needed
        prompts = prompts_of(options["prompt_name"], seed=options["seed"], limit=limit)
    work = prepare_work(chosen, spec, prompts, on_gpu=False, store=Store(options["store"]))
    model = work.model
    on_cpu = plan_scan(work.scan, model.shape, work.prompts, model.dtype, cpu=measure_cpu(model.shape))
    if on_cpu is None:
        _say_unknown(chosen.name, len(work.shards), as_json)
        return
    gpu_dtype = resolve_dtype(spec.dtype, "cuda")
    on_gpu = plan_scan(work.scan, model.shape, work.prompts, gpu_dtype)
    assert on_gpu is not None
    devices = _devices(on_gpu, gpu_dtype) + _devices(on_cpu, model.dtype, only="this CPU")
    if as_json:
        counts = {name: value for name, value in asdict(on_cpu).items() if name not in PER_DEVICE}
        print_json({"model": model.label, **counts, "prompts": len(work.prompts), "devices": devices})
        return
    if on_cpu.at_most:
        console.print(UPPER_BOUND)
    _print(on_cpu, model.label, len(work.prompts), devices)
    console.print("Nothing was run. To run it:")
    print_line(f"  {_run_command(chosen.name)}")


def _say_unknown(name: str, shards: int, as_json: bool) -> None:
    """An experiment that cannot count its cost says so, instead of being counted as another."""
    if as_json:
        print_json({"scan": name, "shards": shards, "flops": None})
    else:
        console.print(f"{name}: {counted(shards, 'shard')}; what this costs is not known to this experiment.")


def _of_workflow(name: str, words: str) -> click.Command:
    """``plan NAME`` of what cannot be counted before it runs; it takes whatever options the command takes."""

    def say(arguments: tuple[str, ...]) -> None:
        if "--json" in arguments:
            print_json({"scan": name, "command": words, "flops": None})
        else:
            print_line(f"{name}: part of 'mathinterp {words}'; its cost is not known in advance.")

    return click.Command(
        name,
        {"ignore_unknown_options": True},
        callback=say,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        help=f"Say that the cost of 'mathinterp {words}' is not known in advance.\n\n\b\nExample:\n"
        f"  mathinterp plan {name}",
    )


plan = ExperimentGroup(
    name="plan",
    run=plan_experiment,
    verb="plan",
    others={
        "chain": sentence_command(plan_experiment, "plan"),
        **{name: _of_workflow(name, words) for name, words in WORKFLOWS.items()},
    },
    help="""Show FLOPs, memory, rows and time of an experiment; loads no weights and needs no Ray.

    \b
    Examples:
      mathinterp plan heads
      mathinterp plan heads --model random:llama-2-7b
      mathinterp plan knockout --heads 0.6,0.1,0.2,0.7
    """,
)


def _devices(cost: "Plan", dtype: str, only: str | None = None) -> list[dict[str, Any]]:
    """A row per device; "auto" means another dtype on a GPU than on a CPU, hence other memory and other speed."""
    memory = {name: getattr(cost, name) for name in PER_DEVICE if name != "seconds"}
    return [
        {"device": device, "dtype": dtype, **memory, "seconds": seconds}
        for device, seconds in cost.seconds.items()
        if (device == only if only else device != "this CPU")
    ]


def _print(cost: "Plan", label: str, prompts: int, devices: list[dict[str, Any]]) -> None:
    facts = {
        "model": f"{label}, {cost.parameters:,} parameters"
        + (", compared with another of as many" if cost.models > 1 else ""),
        "prompts": f"{counted(prompts, 'prompt')}, {cost.tokens:,} tokens, {cost.nodes:,} positions of a clean pass",
        "work": f"{cost.evaluations:,} forward evaluations in {counted(cost.shards, 'shard')},"
        + f" {_tera(cost.flops)} TFLOP"
        + (f" ({_tera(cost.plain_flops)} by full forward passes)" if cost.plain_flops else "")
        + (f" and {_tera(cost.terms)} * 10^12 terms of neurons' sums" if cost.terms else ""),
        "results": f"{cost.rows:,} rows, about {size(cost.result_bytes)}",
    }
    print_table([{"what": name, "how much": value} for name, value in facts.items()], title="Plan")
    print_table(
        [
            {
                "device": row["device"],
                "dtype": row["dtype"],
                "memory of a replica": size(row["peak_bytes"]),
                "weights": size(row["model_bytes"]),
                "clean passes": size(row["cache_bytes"]),
                "computing time": duration(row["seconds"]),
            }
            for row in devices
        ],
        title="On one device, about (this CPU: all cores; models too small to fill a GPU take longer than said)",
    )


def _run_command(name: str) -> str:
    """The command that is planned, with the options that were given here."""
    context = click.get_current_context()
    line = ["mathinterp", "scan", name]
    for option in given_here():
        if isinstance(option, click.Option) and option.expose_value and option.name != "as_json":
            value = context.params[str(option.name)]
            for one in value if option.multiple else [value]:
                line += [option.opts[0]] if option.is_flag else [option.opts[0], _written(one)]
    return shlex.join(line)


def _written(value: object) -> str:
    """An option's value as it is written on the command line."""
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def size(count: int) -> str:
    """Bytes for people."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 180:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"
