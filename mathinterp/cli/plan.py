"""``mathinterp plan``: what a scan costs, before anything loads."""

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mathinterp.cli.options import (
    ablation_options,
    json_option,
    model_options,
    parse_heads,
    parse_layers,
    prompt_options,
    require_one,
)
from mathinterp.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mathinterp.cluster.plan import Plan
    from mathinterp.scans.base import Scan

PER_DEVICE = ("model_bytes", "cache_bytes", "peak_bytes", "seconds")  # fields of a Plan that depend on the dtype


@click.command()
@click.argument("scan", type=click.Choice(["heads", "mlps"]))
@model_options()
@prompt_options()
@ablation_options()
@click.option("--heads", default=None, help="Heads, for example 17.22,14.19; default all of --layers.")
@json_option()
def plan(
    scan: str, model: str, adapter: str | None, dtype: str, trust_remote_code: bool, prompt_name: str,
    limit: int | None, seed: int, ablation: str, positions: str | None, scoring: str | None, layers: str | None,
    engine: str, heads: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show FLOPs, memory, rows and time of a scan; loads no weights and needs no Ray.

    \b
    Examples:
      mathinterp plan heads
      mathinterp plan heads --model random:llama-2-7b
    """
    from mathinterp.cluster.plan import measure_cpu, plan_scan
    from mathinterp.models.catalog import ModelSpec, resolve, resolve_dtype
    from mathinterp.prompts import load_prompts
    from mathinterp.prompts.alignment import tokenize_prompts
    from mathinterp.prompts.pairs import with_counterfactuals

    resolved = resolve(ModelSpec(model, adapter, dtype, trust_remote_code))
    chosen: Scan = _scan(scan, ablation, positions, scoring, engine, heads, layers)
    prompts = load_prompts(prompt_name, seed=seed, limit=limit)
    if chosen.needs_counterfactuals:
        prompts = with_counterfactuals(prompts, resolved.tokenizer)
    tokenized = tokenize_prompts(prompts, resolved.tokenizer)
    on_cpu = plan_scan(chosen, resolved.shape, tokenized, resolved.dtype, cpu_tflops=measure_cpu(resolved.shape))
    gpu_dtype = resolve_dtype(dtype, "cuda")
    on_gpu = plan_scan(chosen, resolved.shape, tokenized, gpu_dtype)
    devices = _devices(on_gpu, gpu_dtype) + _devices(on_cpu, resolved.dtype, only="this CPU")
    if as_json:
        counts = {name: value for name, value in asdict(on_cpu).items() if name not in PER_DEVICE}
        print_json({"model": resolved.label, **counts, "prompts": len(tokenized), "devices": devices})
        return
    _print(on_cpu, resolved.label, len(tokenized), devices)
    console.print("Nothing was run. To run it:", highlight=False)
    console.print(f"  {_scan_command()}", highlight=False, soft_wrap=True)


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
        "model": f"{label}, {cost.parameters:,} parameters",
        "prompts": f"{prompts:,} prompts, {cost.tokens:,} tokens, {cost.nodes:,} tree nodes",
        "work": f"{cost.evaluations:,} forward evaluations in {cost.shards} shards, {_tera(cost.flops)} TFLOP"
        f" ({_tera(cost.plain_flops)} by full forward passes)",
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
                "clean pass": _size(row["cache_bytes"]),
                "computing time": _duration(row["seconds"]),
            }
            for row in devices
        ],
        title="On one device, about (this CPU: all cores; models too small to fill a GPU take longer than said)",
    )


def _scan_command() -> str:
    """The scan with the options that this plan was given."""
    context = click.get_current_context()
    words = ["mathinterp", "scan", context.params["scan"]]
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) == ParameterSource.COMMANDLINE
        if given and isinstance(option, click.Option) and option.name != "as_json":
            value = context.params[str(option.name)]
            words += [option.opts[0]] if option.is_flag else [option.opts[0], str(value)]
    return shlex.join(words)


def _scan(
    scan: str, ablation: str, positions: str | None, scoring: str | None, engine: str, heads: str | None,
    layers: str | None,
) -> "Scan":  # fmt: skip
    from mathinterp.errors import UserError
    from mathinterp.scans.heads import HeadScan
    from mathinterp.scans.mlps import MlpScan

    if scan == "heads":
        require_one(heads, layers)
        return HeadScan(ablation, positions, scoring, engine, heads=parse_heads(heads), layers=parse_layers(layers))
    if heads is not None:
        raise UserError("--heads goes with 'plan heads', not with mlps")
    return MlpScan(ablation, positions, scoring, engine, layers=parse_layers(layers))


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
