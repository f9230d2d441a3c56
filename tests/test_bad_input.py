"""Every command, given what it cannot do: one line that names it, exit code 2, before Ray starts, nothing written."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

# They hold `connection` by name: imported while a stand-in is there, they would keep it.
import mathinterp.evaluation.jobs
import mathinterp.tuning.bases
import mathinterp.tuning.pruning
import mathinterp.tuning.sft_ray
import mathinterp.tuning.sweep
import mathinterp.workflows.edit  # noqa: F401
from mathinterp.cli.main import main
from mathinterp.store import Store
from tests.small_store import fill, prompt

NEURONS = ["--from", "RUN", "--limit", "8"]
GRAPH = ["scan", "graph", *NEURONS]
TRAIN = ["tune", "precise", "--heads", "0.1", "--data", "one_digit", "--out", "new"]
SENTENCE = ["chain", "--sentence", "3+5="]
UNREACHABLE = "s3://bucket/x?endpoint_override=http://127.0.0.1:9"

CASES = [
    # a run that is not there, or of another scan
    (["neuron", "4.312", "--from", "nosuch"], "no run 'nosuch'"),
    (["neuron", "4.312", "--from", "HEADS"], "is a scan of heads, which ranks no neurons"),
    (["neuron", "4.312", "--store", "empty"], "has no finished neuron scan"),
    (["maskkeep", "--from", "HEADS", "--limit", "8"], "is a scan of heads, which ranks no neurons"),
    (["maskkeep", *NEURONS, "--store", "empty"], "no run"),
    (["scan", "graph", "--from", "HEADS", "--limit", "8"], "is a scan of heads, which ranks no neurons"),
    (["tune", "zero", "--from", "RUN", "--out", "new"], "is a scan of neurons, which ranks no heads"),
    (["tune", "zero", "--from", "HEADS", "--top", "9", "--out", "new"], "--top 9: the ranking has only 4 heads"),
    (["knockout", "--from", "' OR 1=1 --"], "no run '' OR 1=1 --'"),
    (["report", "--run", "nosuch", "--out", "new"], "no run nosuch"),
    # heads, layers and neurons that do not exist
    (["neuron", "8.1"], "layer 8 does not exist"),
    (["maskkeep", *NEURONS, "--deep-layers", "x"], "--deep-layers 'x' cannot be read"),
    (["maskkeep", *NEURONS, "--deep-layers", "0-99999999999"], "--deep-layers '0-99999999999': no model has a layer"),
    (["scan", "concepts", "--attention-layers", "x"], "--attention-layers 'x' cannot be read"),
    ([*SENTENCE, "--heads", ""], "--heads '' cannot be read"),
    ([*SENTENCE, "--heads", "0.1,0.1"], "--heads names a head twice"),
    ([*SENTENCE, "--n-heads", "65"], "--n-heads 65: there are only 64 heads"),
    ([*SENTENCE, "--layers", "1", "--n-heads", "9"], "--n-heads 9: there are only 8 heads"),
    (["pipeline", "--top", "65", "--limit", "8"], "--top 65: the model has only 64 heads"),
    (["tune", "prune", "--top", "999999", "--out", "new"], "--top 999999 keeps all"),
    (["edit", "--top", "999999"], "--top 999999: bundled has only 4864 neurons"),
    # counts and numbers
    (["scan", "concepts", "--limit", "0"], "'--limit': 0 is not in the range"),
    (["scan", "concepts", "--limit", "-1"], "'--limit': -1 is not in the range"),
    (["scan", "heads", "--replicas", "0"], "'--replicas': 0 is not in the range"),
    (["scan", "heads", "--gpus-per-replica", "nan"], "'--gpus-per-replica': nan is not a finite number"),
    ([*GRAPH, "--edges", "above:nan"], "--edges 'above:nan' cannot be read"),
    ([*GRAPH, "--edges", "above:inf"], "--edges 'above:inf' cannot be read"),
    ([*TRAIN, "--epochs", "inf"], "'--epochs': inf is not a finite number"),
    ([*TRAIN, "--lr", "nan"], "'--lr': nan is not a finite number"),
    ([*TRAIN, "--lr", "0"], "'--lr': 0.0 is not in the range"),
    ([*TRAIN, "--weight-decay", "-1"], "'--weight-decay': -1.0 is not in the range"),
    ([*TRAIN, "--workers", "0"], "'--workers': 0 is not in the range"),
    (["tune", "sweep", "--epochs", "inf", "--out", "new"], "'--epochs': inf is not a finite number"),
    (["tune", "sweep", "--rates", "nan", "--out", "new"], "--rates 'nan' cannot be read"),
    (["tune", "prune", "--lr", "-1", "--out", "new"], "'--lr': -1.0 is not in the range"),
    # names that are not known, or that do not go together
    ([*GRAPH, "--top", "12", "--ks", "10", "--show", "zzz"], "--show 'zzz': there is no such graph"),
    (["chain", "--limit", "8", "--operation", "pow"], "--operation 'pow': the prompts have all, add, div, mul, sub"),
    ([*SENTENCE, "--limit", "3"], "--limit belongs to --prompts"),
    ([*SENTENCE, "--operation", "add"], "--operation belongs to --prompts"),
    (["tune", "sweep", "--target", "x", "--out", "new"], "'--target': 'x' is not one of 'predicted', 'gold'"),
    (["tune", "prune", "--target", "x", "--out", "new"], "'--target': 'x' is not one of 'predicted', 'gold'"),
    (["evaluate", "--tasks", "one_digit", "--fewshot", "3"], "--fewshot and --examples are for benchmarks"),
    # folders and stores that are a file, or hold something else
    ([*GRAPH, "--out", "file"], "--out 'file' cannot be made"),
    ([*SENTENCE, "--out", "file/x"], "--out 'file/x' cannot be made"),
    (["report", "--out", "file/x"], "--out 'file/x' cannot be made"),
    (["edit", "--out", "file/x"], "--out 'file/x' cannot be made"),
    (["tune", "zero", "--neurons", "0-1", "--out", "new"], "--neurons '0-1' cannot be read; write layer.neuron"),
    (["tune", "zero", "--heads", "0.1", "--out", "file/x"], "--out 'file/x' cannot be made"),
    (["tune", "zero", "--heads", "0.1", "--out", "full"], "--out 'full' exists already"),
    (["tune", "merge", "adapter", "--out", "file/x"], "--out 'file/x' cannot be made"),
    (["tune", "sweep", "--out", "file/x"], "--out 'file/x' cannot be made"),
    (["tune", "prune", "--data", "one_digit", "--out", "full"], "exists and holds something else"),
    ([*TRAIN, "--storage", "file"], "--storage 'file' cannot be made"),
    ([*TRAIN, "--storage", UNREACHABLE], f"--storage '{UNREACHABLE}' cannot be written"),
    ([*TRAIN, "--tensorboard", "file/x"], "--tensorboard 'file/x' cannot be made"),
    (["tune", "sweep", "--data", "one_digit", "--out", "new", "--store", "file"], "store 'file' is a file"),
    (["pipeline", "--limit", "8", "--store", "file"], "store 'file' is a file"),
    # files of the wrong form
    (["scan", "concepts", "--concepts", "binary"], "not UTF-8"),
    (["scan", "concepts", "--prompts", "emoji.jsonl"], "the tokenizer does not know '🙂'"),
    (["maskkeep", "--from", "RUN", "--prompts", "binary"], "not UTF-8"),
    (["pipeline", "--prompts", "full"], "Is a directory"),
    (["evaluate", "--tasks", "empty.jsonl"], "holds no prompts"),
    (["evaluate", "--tasks", "svamp", "--data-dir", "file"], "SVAMP needs"),
    ([*TRAIN[:-4], "--data", "binary", "--out", "new"], "not UTF-8"),
]


@pytest.fixture(scope="module")
def place(scanned: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of obstacles, with the neuron scan and a scan of four heads in ``store``; their run ids by name."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(scanned[0], folder / "store")
    heads = [{"layer": layer, "head": head, "prompt_id": "a"} for layer in (0, 1) for head in (0, 1)]
    run = fill(Store(folder / "store"), [prompt("a")], [{"prompt_id": "a"}], heads)
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    (folder / "file").write_text("words\n")
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "empty.jsonl").write_text("")
    (folder / "emoji.jsonl").write_text(json.dumps({"text": "🙂 plus 4 is", "answer": "7"}) + "\n")
    return folder, {"RUN": scanned[1], "HEADS": run}


@pytest.mark.parametrize(("words", "said"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
@pytest.mark.bundled
def test_one_line_and_nothing_written(place, monkeypatch, words, said):
    folder, runs = place
    monkeypatch.setattr("mathinterp.cluster.ray_cluster.connection", lambda *_: pytest.fail("Ray was started"))
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    store = [] if "--store" in words or words[:2] == ["tune", "merge"] else ["--store", "store"]
    result = CliRunner().invoke(main, [*(runs.get(word, word) for word in words), *store])
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("mathinterp: ")]
    assert said in line
    assert line == result.stderr.splitlines()[-1]
    assert sorted(folder.rglob("*")) == before
