"""The program ``mathinterp``: handles signals before anything is imported, then runs the command line."""

from mathinterp.cli import interrupt
from mathinterp.startup import search_rarely


def main() -> None:
    """Run the command; see ``mathinterp.cli.main``."""
    interrupt.install()
    search_rarely()
    from mathinterp.cli.main import main as command

    with interrupt.unwinding():
        command()
