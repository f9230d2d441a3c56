"""What a shell completes: names of models and prompt sets, folders, and the runs of a store (docs/quickstart.md)."""

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mathinterp.gates import URL

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def folder(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Folders of this machine."""
    return [CompletionItem(begun, type="dir")]


def named(known: Callable[[], Iterable[str]]) -> Completer:
    """Names that are known, else files of this machine."""

    def completed(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in known() if name.startswith(begun)]
        return found or [CompletionItem(begun, type="file")]

    return completed


def run_id(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Runs of the store that the command line names so far, the one written to last first; none of a URL."""
    store = str(context.params.get("store") or "")
    if not store or URL.match(store):
        return []
    records = [file for file in (Path(store).expanduser() / "runs").glob("*.json") if file.stem.startswith(begun)]
    return [CompletionItem(file.stem) for file in sorted(records, key=lambda file: -file.stat().st_mtime)]


def models() -> Iterable[str]:
    """Names of models; those of random shapes have a colon, at which shells cut words."""
    from mathinterp.models.sources import NAMES

    return NAMES


def adapters() -> Iterable[str]:
    """Names of bundled adapters."""
    from mathinterp.models.sources import known_adapters

    return known_adapters()


def prompt_sets() -> Iterable[str]:
    """Names of prompt sets."""
    from mathinterp.prompts import PROMPT_SETS

    return PROMPT_SETS
