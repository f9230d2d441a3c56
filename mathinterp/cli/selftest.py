"""``mathinterp selftest``: prove the identities of the method on a user's own model."""

import sys
from typing import Any

import click

from mathinterp.cli.options import json_option, model_options, prompt_options, spec_of
from mathinterp.cli.output import console, print_json, print_table


@click.command()
@model_options()
@prompt_options()
@click.option("--device", default=None, help="cpu or cuda; default cuda where there is one.")
@json_option()
def selftest(prompt_name: str, limit: int | None, seed: int, device: str | None, as_json: bool, **options: Any) -> None:
    """Check on your model that packed = plain, replay = full forward, hooks = zeroed weights, no-op = clean.

    Attention, coefficients, norms, the residual stream and the lens are also recomputed by hand from the parts that the
    model's family entry names, so that a wrong entry shows.

    Takes 8 prompts unless --limit says otherwise. Exit code 1 if an identity does not hold.

    \b
    Example:
      mathinterp selftest --model ./my-model --dtype float32
    """
    import torch

    from mathinterp.engine.selftest import selftest as run_checks
    from mathinterp.errors import UserError
    from mathinterp.models.catalog import load, resolve
    from mathinterp.models.reading import read_prompts
    from mathinterp.prompts import load_prompts

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device '{device}' is not available here; take cpu")
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
        console.print("All identities hold." if not failed else f"{failed} identities do not hold.", highlight=False)
    if not all(check.holds for check in checks):
        sys.exit(1)
