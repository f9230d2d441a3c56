"""README and documentation say what is true: commands parse, files exist, SQL runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from mathinterp.cli.main import main
from mathinterp.cli.reference import commands, reference
from mathinterp.store import Store

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = "\n".join(
    page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
)
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.startswith("mathinterp ") and "residual_norms" not in line  # of the example, which is run below
]
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
WALKED = [
    line.removesuffix(" & DRIVER=$!") for line in re.findall(r"^\$ (mathinterp .*)", OPERATIONS, flags=re.MULTILINE)
]
COMMANDS = list(dict.fromkeys([*COMMANDS, *WALKED]))
QUERIES = [
    shlex.split(command)[-1]
    for command in COMMANDS
    if command.startswith("mathinterp sql") and "--allow-files" not in command
]


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
    named = re.findall(r"`((?:mathinterp|recipes|ray_jobs|benchmarks|notebooks|docs|tests)/[\w/.]+)`", TEXT)
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


@pytest.mark.slow
def test_views_named_in_the_readme_exist(tmp_path):
    rows = Store(tmp_path).rows("SELECT view_name AS name FROM duckdb_views() WHERE NOT internal")
    views = {row["name"] for row in rows}
    for name in VIEWS:
        assert name in views
        assert f"`{name}`" in README


def test_the_command_reference_is_what_the_commands_say():
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m mathinterp.cli.reference > docs/commands.md"


@pytest.mark.parametrize(("name", "command"), list(commands(main)))
def test_every_command_and_option_is_explained(name, command):
    assert command.help, f"{name} has no help"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} has no help"


@pytest.mark.parametrize(("name", "command"), [("", main), *commands(main)])
def test_no_help_has_slips(name, command):
    shown = command.get_help(click.Context(command, info_name=name, max_content_width=200, terminal_width=200))
    assert not re.findall(r".*(?:\bNone\b|[?!;,]\.(?:\s|$)|`|[^.]\.\.(?:\s|$)).*", shown)


def linked(page: Path) -> list[Path]:
    """Files that a page of ours links to."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [page.parent / link for link in links]


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documentation_lead_somewhere(page):
    assert [link for link in linked(page) if not link.exists()] == []


EXAMPLE = ROOT / "examples" / "my_experiment"
PAGE = (ROOT / "docs" / "adding-an-experiment.md").read_text(encoding="utf-8")
SHOWN_FILES = dict(re.findall(r"```\w+\n(?:#|--) (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))


def test_the_documented_experiment_is_the_example():
    written = [
        file for file in EXAMPLE.rglob("*") if file.suffix in (".py", ".sql", ".toml") and "build" not in file.parts
    ]
    assert {str(file.relative_to(EXAMPLE)): file.read_text(encoding="utf-8") for file in written} == SHOWN_FILES


@pytest.fixture(scope="module")
def own_experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example."""
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("outside") / "my_experiment")


def in_folder(folder: Path, *words: str) -> str:
    """The output of a Python module run there, with this checkout importable."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.bundled
def test_the_documented_experiment_passes_its_test_and_is_planned(own_experiment):
    assert "3 passed" in in_folder(own_experiment, "pytest", "-q", "test_residual_norms.py")
    planned = in_folder(own_experiment, "mathinterp", "plan", "residual_norms:ResidualNorms", "--limit", "32")
    assert "residual_norms: 1 shard;" in planned


@pytest.mark.ray
@pytest.mark.own_ray
def test_the_documented_experiment_runs_on_ray(own_experiment):
    words = ["scan", "residual_norms:ResidualNorms", "--limit", "8", "--replicas", "1", "--out", "drawn"]
    told = in_folder(own_experiment, "mathinterp", *words)
    assert "Mean norm at END" in told
    assert "It grows" in told
    assert len(list((own_experiment / "drawn").glob("residual_norms-*"))) == 2
    assert "nothing left to compute" in in_folder(own_experiment, "mathinterp", *words)
