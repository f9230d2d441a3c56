"""The README says what is true: its commands parse, its files exist, its SQL runs."""

import re
import shlex
from pathlib import Path

import click
import pytest

from mathinterp.cli.main import main
from mathinterp.store import Store

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.startswith("mathinterp ")
]
QUERIES = [shlex.split(command)[-1] for command in COMMANDS if command.startswith("mathinterp sql")]


def test_the_readme_shows_commands_and_queries():
    assert len(COMMANDS) >= 8
    assert len(QUERIES) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    words = shlex.split(command)[1:]
    group, context = main, click.Context(main, info_name="mathinterp")
    while isinstance(group, click.Group):
        name, *words = words
        found = group.get_command(context, name)
        assert found is not None, f"no command '{name}'"
        group = found
    group.make_context(group.name or "", words, parent=context)  # raises UsageError on an unknown option


@pytest.mark.parametrize("query", QUERIES)
def test_queries_run_on_an_empty_store(query, tmp_path):
    table = Store(tmp_path).arrow(query)
    assert table.num_columns > 0


def test_files_named_in_the_readme_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    named = re.findall(r"`((?:mathinterp|recipes|ray_jobs|benchmarks|notebooks|docs|tests)/[\w/.]+)`", README)
    tree = next(
        block for language, block in BLOCKS if not language and "What is where" not in block and "tests/" in block
    )
    for line in tree.splitlines():
        inner = line.startswith("  ")
        path = line.split()[0]
        named.append(f"mathinterp/{path}" if inner else path)
    assert len(named) > 20
    missing = [path for path in {*links, *named} if not (ROOT / path).exists()]
    assert not missing, f"the README names files that are not there: {missing}"


VIEWS = ("head_scan", "mlp_scan", "baseline", "head_effects", "mlp_effects", "paper_a_table1", "runs", "prompts")


def test_views_named_in_the_readme_exist(tmp_path):
    rows = Store(tmp_path).rows("SELECT view_name AS name FROM duckdb_views() WHERE NOT internal")
    views = {row["name"] for row in rows}
    for name in VIEWS:
        assert name in views
        assert f"`{name}`" in README
