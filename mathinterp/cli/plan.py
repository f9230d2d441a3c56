import click


@click.command()
def plan() -> None:
    """placeholder while cluster/plan.py is written"""
