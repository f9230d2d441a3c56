"""The program ``mathinterp``: handles signals before anything is imported, then runs the command line."""

from mathinterp.cli import interrupt


def main() -> None:
    """Run the command; see ``mathinterp.cli.main``."""
    interrupt.install()
    from mathinterp.cli.main import main as command

    with interrupt.unwinding():
        command()


if __name__ == "__main__":
    main()
