"""An experiment from outside the package, installed by its entry point: planned, run on Ray, killed, resumed, queried,
reported. The experiment is examples/my_experiment/, which docs/adding-an-experiment.md shows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from mathinterp.models.catalog import ModelSpec, load
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from tests.installed import install
from tests.killing import FINISHED, joinable_ray, kill_midway
from tests.tiny import randomized, tiny_config, tiny_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.own_ray]

ROOT = Path(__file__).parents[1]
LAYERS, LIMIT = 40, 6
SHARDS = LAYERS // 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama deep enough for five shards."""
    folder, config = tmp_path_factory.mktemp("deep"), tiny_config("llama")
    config.num_hidden_layers = LAYERS
    randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def installed_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray, and an environment of its drivers, in whose path the experiment is installed beside this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    install(ROOT / "examples" / "my_experiment", folder, ["pyproject.toml", "residual_norms"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        with joinable_ray() as environment:
            yield environment


def command(environment: dict[str, str], words: Sequence[str], folder: Path) -> str:
    """What ``mathinterp words`` prints, run in ``folder``."""
    line = [sys.executable, "-m", "mathinterp", *words]
    done = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored_rows(store: Path) -> list[dict[str, object]]:
    """Every row of every file of the table, in order; a row that is there twice is there twice."""
    files = sorted(store.glob("residual_norms/run_id=*/shard-*.parquet"))
    assert len({file.parent for file in files}) == 1
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted(rows, key=lambda row: (row["layer"], row["prompt_id"]))


def test_an_installed_experiment_is_planned_run_killed_resumed_queried_and_reported(installed_ray, model, tmp_path):
    store, whole = tmp_path / "store", tmp_path / "whole"
    asked = ["residual_norms", "--model", str(model), "--limit", str(LIMIT), "--measure", "max"]
    scan = ["scan", *asked, "--replicas", "1", "--json", "--store"]
    assert f"residual_norms: {SHARDS} shards" in command(installed_ray, ["plan", *asked], tmp_path)

    assert FINISHED <= kill_midway(installed_ray, "residual_norms", [*scan, str(store)], store) < SHARDS
    kept = {file: file.stat().st_mtime_ns for file in store.glob("residual_norms/*/*.parquet")}
    resumed = json.loads(command(installed_ray, [*scan, str(store)], tmp_path))
    assert (resumed["shards"], resumed["shards_reused"]) == (SHARDS, len(kept))
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    undisturbed = json.loads(command(installed_ray, [*scan, str(whole)], tmp_path))
    assert (undisturbed["run_id"], undisturbed["shards_reused"]) == (resumed["run_id"], 0)
    rows = stored_rows(store)
    assert rows == stored_rows(whole)
    assert len(rows) == LAYERS * LIMIT

    question = "SELECT layer, n, mean FROM residual_norm_means ORDER BY layer"
    answer = json.loads(command(installed_ray, ["sql", "--store", str(store), "--json", question], tmp_path))
    expected = means_by_hand(model)
    assert [(row["layer"], row["n"]) for row in answer] == [(layer, LIMIT) for layer in range(LAYERS)]
    assert [row["mean"] for row in answer] == pytest.approx(expected, rel=1e-5)

    command(installed_ray, ["report", "--store", str(store), "--out", str(tmp_path / "report"), "--pictures"], tmp_path)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert f"It grows {expected[-1] / expected[0]:.3g} times." in page
    assert len(list((tmp_path / "report").rglob(f"residual_norms-{resumed['run_id']}*"))) == 2  # PNG and SVG


def means_by_hand(model: Path) -> list[float]:
    """The mean over prompts of the largest entry at END on entering each layer, as transformers returns them."""
    loaded = load(ModelSpec(str(model)), "cpu")
    largest_LP = []
    for prompt in tokenize_prompts(load_prompts("two_digit", limit=LIMIT), loaded.tokenizer):
        ids = torch.tensor([prompt.input_ids[: prompt.end + 1]])
        with torch.inference_mode():
            states = loaded.anatomy.model(ids, output_hidden_states=True).hidden_states
        largest_LP.append([state[0, -1].abs().max().item() for state in states[:LAYERS]])
    return torch.tensor(largest_LP, dtype=torch.float64).mean(dim=0).tolist()
