"""The project's own files: pinned dependencies, benchmarks that all run, continuous integration."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mathinterp
from benchmarks import run_all

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]
PINNED = {
    canonicalize_name(found[1]): found[2]
    for found in re.finditer(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
}


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_every_direct_dependency_is_pinned_within_its_range(requirement):
    pinned = PINNED.get(canonicalize_name(requirement.name))
    assert pinned is not None, f"{requirement.name} has no version in constraints.txt"
    assert requirement.specifier.contains(pinned)


def test_nothing_is_pinned_that_is_no_direct_dependency():
    assert set(PINNED) == {canonicalize_name(requirement.name) for requirement in DIRECT}


def test_continuous_integration_runs_the_script():
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy"]


def test_continuous_integration_runs_what_make_test_skips_of_object_stores():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["object-store"]["steps"] if "run" in step] == ["make test-stores"]
    makefile = (ROOT / "Makefile").read_text()
    target, environment = makefile.partition("\ntest-stores: ")[2], makefile.partition("\n$(STORES)/.installed: ")[2]
    assert "pytest tests/test_object_store.py tests/test_google_store.py" in target.partition("\n\n")[0]
    assert '".[s3-test,gcs-test]"' in environment.partition("\n\n")[0]


def test_a_benchmark_leaves_a_json_line(tmp_path, monkeypatch):
    asked = []

    def figures(name: str, options: list[str]) -> dict[str, float]:
        asked.append((name, options))
        return {"seconds": 1.5}

    monkeypatch.setattr(run_all, "figures_of", figures)
    for words in (["sql"], ["sql", "--", "--threads", "4"]):
        done = CliRunner().invoke(run_all.main, ["--results", str(tmp_path), *words])
        assert done.exit_code == 0, done.output
    first, second = map(json.loads, (tmp_path / "sql.jsonl").read_text().splitlines())
    assert first["figures"] == {"seconds": 1.5}
    assert {"at", "commit", "dirty", "cpu", "cores", "gpus", "torch"} <= first.keys()
    assert (first["options"], second["options"]) == ([], ["--threads", "4"])
    asked.clear()
    assert CliRunner().invoke(run_all.main, ["--results", str(tmp_path)]).exit_code == 0
    assert [name for name, _ in asked] == list(run_all.BENCHMARKS)
    assert CliRunner().invoke(run_all.main, ["nosuch"]).exit_code == 2


def test_every_benchmark_is_run_but_checks():
    checks = {
        "run_all",
        "replica_equality",
        "mib_equality",
        "disturbed",
        "trial",
    }  # these measure nothing by themselves
    assert {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - checks == set(run_all.BENCHMARKS)


PAPERS = {
    "2409.14144": (
        "Interpreting Arithmetic Mechanism in Large Language Models through Comparative Neuron Analysis",
        ["Zeping Yu", "Sophia Ananiadou"],
    ),
    "2409.01659": (
        "Interpreting and Improving Large Language Models in Arithmetic Calculation",
        ["Wei Zhang", "Chaoqun Wan", "Yonggang Zhang", "Yiu-ming Cheung", "Xinmei Tian", "Xu Shen", "Jieping Ye"],
    ),
}


def test_the_citation_is_of_this_version_and_names_both_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what its JSON schema requires
    assert (cited["cff-version"], cited["title"], cited["type"]) == ("1.2.0", PROJECT["name"], "software")
    assert cited["authors"] == [{"name": "mathinterp contributors"}]
    assert (cited["version"], cited["license"]) == (mathinterp.__version__, PROJECT["license"])
    found = {}
    for paper in cited["references"]:
        (number,) = (each["value"].removeprefix("arXiv:") for each in paper["identifiers"])
        assert paper["url"] == f"https://arxiv.org/abs/{number}"
        names = [f"{each['given-names']} {each['family-names']}" for each in paper["authors"]]
        found[number] = (paper["title"], names)
    assert found == PAPERS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"https://arxiv.org/abs/{number}" in readme for number in found)
