"""Kill -9 of the driver in the middle of scans that read neurons, and of a fine-tuning; the same command ends as an
undisturbed one.

The undisturbed rows of scans are made without Ray: each shard once, in this process.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from unittest import mock

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mathinterp.cli.main import main
from mathinterp.cluster.run import prepare_work
from mathinterp.experiments.base import Experiment, Subject
from mathinterp.experiments.concept_zeroing import ConceptZeroing, NeuronSet
from mathinterp.experiments.concepts.summary import kept_neurons
from mathinterp.experiments.results import Results
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.store import Store
from tests.killing import FINISHED, kill_midway
from tests.tiny import save_tiny

pytestmark = pytest.mark.ray


def finish(words: Sequence[str]) -> None:
    """The same command to its end."""
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == 0, (result.output, result.exception)


def what_would_run(words: Sequence[str]) -> Experiment:
    """The experiment of a command, with what follows from model, prompts and store filled in."""
    with mock.patch("mathinterp.cli.experiment.run_chosen", side_effect=KeyboardInterrupt) as asked:
        CliRunner().invoke(main, list(words))
    (chosen,), options = asked.call_args
    spec = options["spec"]
    prompts = load_prompts(options["prompt_name"], seed=options["seed"], limit=options["limit"])
    return prepare_work(chosen, spec, prompts, on_gpu=False, store=Store(options["store"])).scan


def undisturbed(scan: Experiment, model: str, limit: int) -> dict[str, pa.Table]:
    """All rows of ``scan``, by table."""
    torch.set_num_threads(1)  # as a replica of a small model has, however many cores there are
    loaded = load(ModelSpec(model), "cpu")
    prompts = tokenize_prompts(load_prompts("two_digit", limit=limit), loaded.tokenizer)
    state = scan.prepare(Subject(loaded.anatomy, prompts, tokenizer=loaded.tokenizer))
    made: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(loaded.anatomy.shape, prompts):
        made.setdefault(shard.table, []).append(scan.run(state, shard))
    return {table: pa.concat_tables(parts) for table, parts in made.items()}


def assert_stored(store: Store, scan: str, expected: dict[str, pa.Table]) -> str:
    """The one run of ``scan`` is finished and has these rows, each once; returns its id."""
    (run,) = store.rows(f"SELECT run_id, status, shards, shards_done FROM runs WHERE scan = '{scan}'")
    assert (run["status"], run["shards_done"]) == ("finished", run["shards"])
    for table, rows in expected.items():
        names = [(name, "ascending") for name in rows.column_names]
        stored = store.arrow(f"SELECT * EXCLUDE (run_id) FROM {table} WHERE run_id = '{run['run_id']}'")
        assert stored.select(rows.column_names).sort_by(names).to_pylist() == rows.sort_by(names).to_pylist(), table
    return run["run_id"]


def test_concepts_killed_while_reading_and_again_while_zeroing(local_ray, tmp_path):
    folder, store, limit = str(save_tiny(tmp_path / "llama", "llama")), tmp_path / "store", 4
    words = ["scan", "concepts", "--model", folder, "--store", str(store), "--replicas", "1", "--limit", str(limit),
             "--layers", "0", "--attention-layers", "0-2", "--into", "all", "--top", "6", "--levels", "0,1,2,3",
             "--control-seeds", "1"]  # fmt: skip
    assert FINISHED <= kill_midway(local_ray, "concept_scan", words, store) < 4
    assert FINISHED <= kill_midway(local_ray, "concept_zeroing", words, store) < 4
    finish(words)
    read = assert_stored(Store(store), "concepts", undisturbed(what_would_run(words), folder, 1))
    sets = tuple(NeuronSet(*item) for item in kept_neurons(Results(Store(store), read), [0, 1, 2, 3]).items())
    assert len(sets) == 4
    assert_stored(Store(store), "concept_zeroing", undisturbed(ConceptZeroing(sets, read, 1), folder, limit))


@pytest.mark.bundled
def test_graph_killed_midway(local_ray, scanned, tmp_path):
    store, limit = tmp_path / "store", 8
    shutil.copytree(scanned[0], store)
    words = ["scan", "graph", "--from", scanned[1], "--store", str(store), "--replicas", "1", "--limit",
             str(limit), "--by", "operation", "--top", "12", "--ks", "10", "--control-seeds", "1"]  # fmt: skip
    assert FINISHED <= kill_midway(local_ray, "neuron_graph_check", words, store) < 5
    finish(words)
    assert_stored(Store(store), "graph", undisturbed(what_would_run(words), "bundled", limit))


def test_fine_tuning_killed_midway(local_ray, tmp_path):
    folder, interval, steps = str(save_tiny(tmp_path / "llama", "llama")), 20, 80

    def words(name: str) -> list[str]:
        return ["tune", "precise", "--model", folder, "--heads-sql", "SELECT 1 AS layer, 2 AS head", "--cpu", "--data",
                "signed_two_digit_test", "--steps", str(steps), "--batch", "8", "--checkpoint-every", str(interval),
                "--lr", "0.01", "--store", str(tmp_path / f"{name}-store"), "--out", str(tmp_path / name)]  # fmt: skip

    rows = tmp_path / "killed-store" / "tuning_runs"
    command = [sys.executable, "-m", "mathinterp", *words("killed")]
    driver = subprocess.Popen(command, env=local_ray, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while len(list(rows.glob("*/shard-*.parquet"))) < 1 and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    driver.kill()
    _, said = driver.communicate()
    assert driver.returncode == -signal.SIGKILL, said.decode()
    before = len(list(rows.glob("*/shard-*.parquet")))
    assert 1 <= before < steps // interval
    assert not (tmp_path / "killed").exists()
    finish(words("killed"))
    finish(words("whole"))
    stored = [Store(str(tmp_path / f"{name}-store")).rows("SELECT step, loss, lr FROM tuning_runs ORDER BY step")
              for name in ("killed", "whole")]  # fmt: skip
    assert stored[0] == stored[1]
    assert stored[0][-1]["step"] == steps
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("killed", "whole")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    about = json.loads((tmp_path / "whole" / "tuning.json").read_text())
    assert about["chosen_from"] == "SELECT 1 AS layer, 2 AS head"
