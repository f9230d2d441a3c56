"""``mathinterp models``: what can be scanned by name."""

from dataclasses import asdict

import click

from mathinterp.cli.options import json_option
from mathinterp.cli.output import print_json, print_table


@click.command()
@json_option()
def models(as_json: bool) -> None:
    """List the models known by name; any Hugging Face decoder folder, .gguf file or hub id works too.

    \b
    Example:
      mathinterp models
    """
    from mathinterp.models.catalog import known_models
    from mathinterp.models.families import FAMILIES

    entries = [asdict(entry) for entry in known_models()]
    if as_json:
        print_json(entries)
        return
    print_table(entries)
    click.echo(f"Families (config.model_type): {', '.join(sorted(FAMILIES))}")
