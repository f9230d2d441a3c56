"""``mathinterp selftest``: prove the identities of the method on a user's own model."""

import sys
import time
from typing import Any

import click

from mathinterp.cli.options import given_here, json_option, model_options, prompt_options, spec_of
from mathinterp.cli.output import console, print_json, print_table
from mathinterp.errors import UserError

OF_WRITTEN = ("ground_truth", "dtype", "device", "as_json")  # options that go with --ground-truth


@click.command()
@model_options()
@prompt_options()
@click.option("--device", default=None, help="cpu or cuda; default cuda where there is one.")
@click.option(
    "--ground-truth",
    is_flag=True,
    help="Instead: run every method on small models whose circuit is known, as their weights were written.",
)
@json_option()
def selftest(
    prompt_name: str, limit: int | None, seed: int, device: str | None, ground_truth: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check on your model that packed = plain, replay = full forward, hooks = zeroed weights, no-op = clean.

    Attention, coefficients, norms, the residual stream and the lens are also recomputed by hand from the parts that the
    model's family entry names, so that a wrong entry shows.

    Takes 8 prompts unless --limit says otherwise. Exit code 1 if an identity does not hold.

    With --ground-truth (half a minute) no model of yours is looked at: exact methods must find the circuits of written
    models (AUROC 1), approximate ones are shown as they do, and where a method is known to fail the table says why.
    Exit code 1 if an exact method does otherwise.

    \b
    Examples:
      mathinterp selftest --model ./my-model --dtype float32
      mathinterp selftest --ground-truth
    """
    import torch

    from mathinterp.engine.selftest import selftest as run_checks
    from mathinterp.models.catalog import load, resolve
    from mathinterp.models.reading import read_prompts
    from mathinterp.prompts import load_prompts

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device '{device}' is not available here; take cpu")
    if ground_truth:
        return _ground_truth(options["dtype"], device, as_json)
    resolved = resolve(spec_of(options), device)
    chosen = load_prompts(prompt_name, seed=seed, limit=8 if limit is None else limit)
    prompts = read_prompts(chosen, resolved)
    loaded = load(resolved, device)
    checks = list(run_checks(loaded.anatomy, prompts))
    rows = [
        {"identity": c.identity, "largest difference": c.difference, "limit": c.limit, "holds": c.holds} for c in checks
    ]
    if as_json:
        print_json({"model": resolved.label, "dtype": resolved.dtype, "device": device, "checks": rows})
    else:
        print_table(rows, title=f"{resolved.label}, {resolved.dtype} on {device}, {len(prompts)} prompts (nats)")
        failed = sum(not check.holds for check in checks)
        console.print("All identities hold." if not failed else f"{failed} identities do not hold.")
    if not all(check.holds for check in checks):
        sys.exit(1)


def _ground_truth(dtype: str, device: str, as_json: bool) -> None:
    """Every method on the written models; exit code 1 if one does not do as expected."""
    from mathinterp.models.ground_truth import PLANTED
    from mathinterp.workflows.ground_truth import recoveries

    for option in given_here():
        if option.name not in OF_WRITTEN:
            raise UserError(f"{option.opts[0]} says nothing about written models; leave it out, or --ground-truth")
    dtype, started, found = "float32" if dtype == "auto" else dtype, time.monotonic(), []
    for name, build in PLANTED.items():
        rows = [
            {"method": r.method, "planted": r.planted, "auroc": r.auroc, "weakest": r.weakest, "margin": r.margin,
             "expected": r.expected or "as found", "holds": r.holds}
            for r in recoveries([name], dtype=dtype, device=device)
        ]  # fmt: skip
        found += [{"model": name, **row} for row in rows]
        if not as_json:
            print_table(rows, title=f"{name}: {(build.__doc__ or '').strip().splitlines()[0]}")
    failed = sum(not row["holds"] for row in found)
    if as_json:
        print_json({"dtype": dtype, "device": device, "methods": found})
    else:
        said = "Every method does as expected" if not failed else f"{failed} methods do not do as expected"
        seconds = time.monotonic() - started
        console.print("auroc: of the absolute scores of what was planted against all others of its kind.")
        console.print("margin: the weakest of the planted over the largest other.")
        console.print(f"{said} ({dtype} on {device}, {seconds:.0f} s).")
    if failed:
        sys.exit(1)
