"""``mathinterp plan``: what a scan costs, before anything loads."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mathinterp.cli.options import (
    ablation_options,
    json_option,
    model_options,
    parse_heads,
    parse_layers,
    prompt_options,
)
from mathinterp.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mathinterp.scans.base import Scan


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
      mathinterp plan heads --model random:llama-2-7b --dtype bfloat16
    """
    from mathinterp.cluster.plan import measure_cpu, plan_scan
    from mathinterp.models.catalog import ModelSpec, resolve
    from mathinterp.prompts import load_prompts
    from mathinterp.prompts.alignment import tokenize_prompts
    from mathinterp.prompts.pairs import with_counterfactuals

    resolved = resolve(ModelSpec(model, adapter, dtype, trust_remote_code))
    chosen: Scan = _scan(scan, ablation, positions, scoring, engine, heads, layers)
    prompts = load_prompts(prompt_name, seed=seed, limit=limit)
    if chosen.needs_counterfactuals:
        prompts = with_counterfactuals(prompts, resolved.tokenizer)
    tokenized = tokenize_prompts(prompts, resolved.tokenizer)
    cost = plan_scan(chosen, resolved.shape, tokenized, resolved.dtype, cpu_tflops=measure_cpu(resolved.shape))
    if as_json:
        print_json(asdict(cost))
        return
    facts = {
        "model": f"{resolved.label}, {resolved.dtype}, {cost.parameters:,} parameters",
        "work": f"{cost.evaluations:,} forward evaluations in {cost.shards} shards, {cost.flops / 1e12:,.3g} TFLOP"
        f" ({cost.plain_flops / 1e12:,.3g} by full forward passes)",
        "prompts": f"{len(tokenized)} prompts, {cost.tokens:,} tokens, {cost.nodes:,} tree nodes",
        "results": f"{cost.rows:,} rows, about {_size(cost.result_bytes)}",
        "memory": f"about {_size(cost.peak_bytes)} a replica ({_size(cost.model_bytes)} of it weights,"
        f" {_size(cost.cache_bytes)} clean pass)",
    }
    print_table([{"what": name, "how much": value} for name, value in facts.items()], title="Plan (nothing was run)")
    times = [{"device": device, "seconds, about": seconds} for device, seconds in cost.seconds.items()]
    print_table(times, title="Time on one device, after loading")
    console.print(f"  mathinterp scan {scan} --model {model} --prompts {prompt_name}", highlight=False, soft_wrap=True)


def _scan(
    scan: str, ablation: str, positions: str | None, scoring: str | None, engine: str, heads: str | None,
    layers: str | None,
) -> "Scan":  # fmt: skip
    from mathinterp.errors import UserError
    from mathinterp.scans.heads import HeadScan
    from mathinterp.scans.mlps import MlpScan

    if scan == "heads":
        return HeadScan(ablation, positions, scoring, engine, heads=parse_heads(heads), layers=parse_layers(layers))
    if heads is not None:
        raise UserError("--heads goes with 'plan heads', not with mlps")
    return MlpScan(ablation, positions, scoring, engine, layers=parse_layers(layers))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
