"""A finished run asked for again needs no model, and is never believed over files that have changed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cluster import again, run
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.knockout import Knockout
from mathinterp.models import recalled
from mathinterp.models.spec import ModelSpec
from mathinterp.prompts.given import prompts_of
from mathinterp.store import Store
from tests.tiny import save_tiny

SCAN = [
    "scan", "heads", "--prompts", "prompts.jsonl", "--layers", "0", "--gpus-per-replica", "0", "--dtype", "float32",
    "--store", "store", "--json",
]  # fmt: skip
HEAVY = """
import sys
from mathinterp.cli.main import main
main(sys.argv[1:], standalone_mode=False)
print([name for name in ("torch", "transformers", "ray", "peft", "pandas") if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """A cache of the test's own, and runs in this process: Ray has no part in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    real = run.place_of
    monkeypatch.setattr(run, "place_of", lambda model, stack, *placed: real(model, stack, None, None, None))
    Path("prompts.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{a} plus 5 is", "answer": str(a + 5), "operation": "add"}) for a in (3, 14))
    )


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that a test may change."""
    return save_tiny(tmp_path / "model", "llama")


@pytest.fixture
def long_way(monkeypatch) -> list[str]:
    """Names of the experiments that went through run_scan."""
    gone: list[str] = []
    real = run.run_scan
    monkeypatch.setattr(
        run, "run_scan", lambda scan, *given, **more: gone.append(scan.name) or real(scan, *given, **more)
    )
    return gone


def words(model: Path, *more: str) -> list[str]:
    return [*SCAN, "--model", str(model), *more]


def scanned(*given: str) -> dict:
    done = CliRunner().invoke(main, list(given), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    return {name: value for name, value in found.items() if name != "seconds"}


@pytest.mark.slow
def test_a_finished_run_loads_neither_torch_nor_transformers(model):
    first = scanned(*words(model))
    assert first["shards_done"] == first["shards"]
    done = subprocess.run([sys.executable, "-c", HEAVY, *words(model)], capture_output=True, text=True, check=True)
    again = json.loads(done.stdout)
    assert done.stderr.splitlines()[-1] == "[]"
    assert again["shards_reused"] == first["shards"]
    counts = ("seconds", "shards_reused", "shards_done", "rows")
    assert {k: v for k, v in again.items() if k not in counts} == {k: v for k, v in first.items() if k not in counts}


@pytest.mark.slow
def test_both_ways_leave_the_same_record(model, long_way):
    run_id = scanned(*words(model))["run_id"]
    record = Path("store", "runs", f"{run_id}.json")
    kept = []
    for _ in range(2):
        short = scanned(*words(model))
        kept.append({**json.loads(record.read_text()), "wall_seconds": 0})
        shutil.rmtree(again.cache_folder())
    assert (long_way, kept[0]) == (["heads"] * 2, kept[1])
    assert short["run_id"] == run_id


def _rewritten(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


CHANGES = {
    "weights": lambda model, patch: save_tiny(model, "llama", seed=1),
    "config": lambda model, patch: _rewritten(model / "config.json", '"use_cache": true', '"use_cache": false'),
    "tokenizer": lambda model, patch: (model / "tokenizer.json").write_text(
        json.dumps(json.loads((model / "tokenizer.json").read_text()), indent=7)
    ),
    "prompts": lambda model, patch: _rewritten(Path("prompts.jsonl"), "3 plus", "4 plus"),
    "a library": lambda model, patch: patch.setattr(recalled, "_version", lambda name: "0.0"),
    "this package": lambda model, patch: patch.setattr(recalled, "source_digest", lambda: "0" * 12),
}


def key(model: Path, **more) -> str | None:
    spec = ModelSpec(str(model), dtype=more.pop("dtype", "float32"))
    return again.key_of(Heads(**more), spec, prompts_of("prompts.jsonl"), 0, "local")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_believed_when_what_decides_has_changed(model, change, monkeypatch):
    before = key(model)
    assert before == key(model) is not None
    CHANGES[change](model, monkeypatch)
    assert before != key(model) is not None


@pytest.mark.parametrize(
    "more", [{"layers": "1"}, {"dtype": "float64"}, {"ablation": "mean"}, {"scoring": "first_token"}]
)
def test_other_options_are_another_question(model, more):
    assert key(model) != key(model, **more) is not None


@pytest.mark.slow
def test_another_store_and_changed_weights_are_computed(model, long_way):
    first = scanned(*words(model))
    assert scanned(*words(model, "--store", "other"))["shards_done"] == first["shards"]
    save_tiny(model, "llama", seed=1)
    second = scanned(*words(model))
    assert (second["shards_done"], second["run_id"] == first["run_id"]) == (first["shards"], False)
    assert long_way == ["heads"] * 3


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "table"), [(_flipped, "head_scan"), (Path.unlink, "baseline"), (_flipped, "prompts")])
def test_what_is_lost_or_damaged_is_computed_again(model, long_way, harm, table):
    first = scanned(*words(model))
    rows = Store("store").arrow("SELECT * FROM head_scan ORDER BY ALL")
    harm(next(Path("store").glob(f"{table}/*/*.parquet")))
    second = scanned(*words(model))
    assert (long_way, second["shards_reused"]) == (
        ["heads"] * 2,
        first["shards"] - ("scan" in table or table == "baseline"),
    )
    assert Store("store").arrow("SELECT * FROM head_scan ORDER BY ALL").equals(rows)
    assert next(Path("store").glob(f"{table}/*/*.parquet")).is_file()


@pytest.mark.slow
def test_a_broken_memory_is_none(model, long_way):
    scanned(*words(model))
    (file,) = (again.cache_folder() / "runs").iterdir()
    whole = file.read_bytes()
    assert again._recall(file.name)
    file.with_name("f" * 32).write_bytes(whole)
    for content in (b"", b"\xff", b"0 {}", b"{}", whole[:-1]):
        file.write_bytes(content)
        assert again._recall(file.name) is again._recall("f" * 32) is None
    scanned(*words(model))
    assert long_way == ["heads"] * 2


@pytest.mark.slow
def test_files_that_change_while_they_are_read_are_not_remembered(model, monkeypatch):
    real = run.bound_work

    def bound(*given):
        work = real(*given)
        _rewritten(model / "config.json", '"use_cache": true', '"use_cache": false')
        return work

    monkeypatch.setattr(run, "bound_work", bound)
    scanned(*words(model))
    assert not (again.cache_folder() / "runs").exists()


@pytest.mark.parametrize("more", [{"trust_remote_code": True}, {"name": "random:llama-tiny"}, {"name": "owner/name"}])
def test_models_that_only_loading_can_tell_take_the_long_way(more):
    assert (
        again.key_of(Heads(), ModelSpec(**{"name": "bundled", **more}), prompts_of("two_digit", limit=2), 0, "local")
        is None
    )


def test_what_depends_on_other_runs_or_on_a_gpu_takes_the_long_way(monkeypatch):
    prompts, spec = prompts_of("two_digit", limit=2), ModelSpec()
    assert again.key_of(Heads(), spec, prompts, 0, "local")
    for scan in (Knockout(heads="0.1"), Iterative()):  # the second looks at what the store has of it
        assert again.key_of(scan, spec, prompts, 0, "local") is None
    assert again.key_of(Heads(), spec, prompts, 0.5, "local") is None
    assert again.key_of(Heads(), spec, prompts, 0, "10.0.0.1:6379") is None
    monkeypatch.setattr(again, "GPU_FILES", (__file__,))
    assert again.key_of(Heads(), spec, prompts, None, "local") is None
