"""``mathinterp plan``: what a scan costs, before anything loads.

Each command under it takes the options of the scan it plans, and asks the scan's own command what it would run.
"""

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mathinterp.cli.knockout import knockout
from mathinterp.cli.output import console, print_json, print_table
from mathinterp.cli.running import NotRun, without_running
from mathinterp.cli.scan import scan

if TYPE_CHECKING:
    from mathinterp.cluster.plan import Plan

PER_DEVICE = ("model_bytes", "cache_bytes", "peak_bytes", "seconds")  # fields of a Plan that depend on the dtype
SCANS = ("heads", "mlps", "paths", "attention", "probe", "neurons")
PLANNED = {
    **{name: (f"scan {name}", scan.commands[name]) for name in SCANS},
    "knockout": ("knockout", knockout),
}  # name under plan -> the command's words and the command


@click.group()
def plan() -> None:
    """Show FLOPs, memory, rows and time of a scan; loads no weights and needs no Ray.

    \b
    Examples:
      mathinterp plan heads
      mathinterp plan heads --model random:llama-2-7b
      mathinterp plan knockout --heads 0.6,0.1,0.2,0.7
    """


def _add(name: str, words: str, command: click.Command) -> None:
    """Put ``plan NAME`` beside the command it plans, with the same options."""
    example = " --heads 0.6,0.1,0.2,0.7" if name == "knockout" else " --limit 400"
    text = f"""Show what 'mathinterp {words}' with the same options costs.

    \b
    Example:
      mathinterp plan {name}{example}
    """

    def callback(**options: Any) -> None:
        _show(_asked(command, options), words, options["as_json"])

    settings = command.context_settings
    plan.add_command(click.Command(name, settings, callback, params=command.params, help=text))


for _name, (_words, _command) in PLANNED.items():
    _add(_name, _words, _command)


def _asked(command: click.Command, options: dict[str, Any]) -> NotRun:
    """What the command would run."""
    assert command.callback is not None
    try:
        with without_running():
            command.callback(**options)
    except NotRun as asked:
        return asked
    raise AssertionError(f"'{command.name}' ran nothing")


def _show(asked: NotRun, words: str, as_json: bool) -> None:
    from mathinterp.cluster.plan import measure_cpu, plan_scan
    from mathinterp.models.catalog import ModelSpec, resolve, resolve_dtype
    from mathinterp.models.reading import read_prompts
    from mathinterp.prompts import load_prompts
    from mathinterp.prompts.pairs import with_counterfactuals

    resolved = resolve(ModelSpec(**asked.model_options))
    prompts = load_prompts(**asked.prompt_options)
    if asked.chosen.needs_counterfactuals:
        prompts = with_counterfactuals(prompts, resolved.tokenizer)
    tokenized = read_prompts(prompts, resolved, asked.chosen.tokens_read)
    on_cpu = plan_scan(asked.chosen, resolved.shape, tokenized, resolved.dtype, cpu=measure_cpu(resolved.shape))
    gpu_dtype = resolve_dtype(asked.model_options["dtype"], "cuda")
    on_gpu = plan_scan(asked.chosen, resolved.shape, tokenized, gpu_dtype)
    devices = _devices(on_gpu, gpu_dtype) + _devices(on_cpu, resolved.dtype, only="this CPU")
    if as_json:
        counts = {name: value for name, value in asdict(on_cpu).items() if name not in PER_DEVICE}
        print_json({"model": resolved.label, **counts, "prompts": len(tokenized), "devices": devices})
        return
    _print(on_cpu, resolved.label, len(tokenized), devices)
    console.print("Nothing was run. To run it:", highlight=False)
    console.print(f"  {_run_command(words)}", highlight=False, soft_wrap=True)


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
        "prompts": f"{prompts:,} prompts, {cost.tokens:,} tokens, {cost.nodes:,} {_nodes(cost)}",
        "work": f"{cost.evaluations:,} forward evaluations in {cost.shards} shards, {_tera(cost.flops)} TFLOP"
        + (f" ({_tera(cost.plain_flops)} by full forward passes)" if cost.plain_flops else "")
        + (f" and {_tera(cost.terms)} * 10^12 terms of neurons' sums" if cost.terms else ""),
        "results": f"{cost.rows:,} rows, about {_size(cost.result_bytes)}",
    }
    print_table([{"what": name, "how much": value} for name, value in facts.items()], title="Plan")
    print_table(
        [
            {
                "device": row["device"],
                "dtype": row["dtype"],
                "memory of a replica": _size(row["peak_bytes"]),
                "weights": _size(row["model_bytes"]),
                "clean passes": _size(row["cache_bytes"]),
                "computing time": _duration(row["seconds"]),
            }
            for row in devices
        ],
        title="On one device, about (this CPU: all cores; models too small to fill a GPU take longer than said)",
    )


def _nodes(cost: "Plan") -> str:
    return "tree nodes" if cost.scan in ("heads", "mlps", "knockout", "iterative") else "of them up to END"


def _run_command(words: str) -> str:
    """The command that is planned, with the options that were given here."""
    context = click.get_current_context()
    line = ["mathinterp", *words.split()]
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) == ParameterSource.COMMANDLINE
        if given and isinstance(option, click.Option) and option.name != "as_json":
            value = context.params[str(option.name)]
            for one in value if option.multiple else [value]:
                line += [option.opts[0]] if option.is_flag else [option.opts[0], str(one)]
    return shlex.join(line)


def _size(count: int) -> str:
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 180:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"
