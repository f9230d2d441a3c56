"""The command line: help that teaches, results that add up, and one clear line for every mistake of the user."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file

from mathinterp.cli.group import first_sentence
from mathinterp.cli.main import Commands, main
from mathinterp.cli.output import place, print_sql_hint, print_table, store_option
from mathinterp.cli.running import print_run
from mathinterp.cluster.dispatch import ShardFailure
from mathinterp.cluster.events import NoReplicaLeft
from mathinterp.cluster.run import RunSummary
from mathinterp.experiments.registry import experiments
from mathinterp.store import Store
from tests.small_store import fill, prompt
from tests.tiny import save_tiny, tiny_model

SCORED_TOKENS = "SELECT count(*) AS n FROM baseline"
ROWS_AND_HEADS = "SELECT count(*) AS n, count(DISTINCT (layer, head)) AS heads FROM head_scan"

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def assert_one_line(result: Result, *parts: str) -> None:
    """Exit code 2, one line on stderr that says all of ``parts``, no traceback."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    for part in parts:
        assert part in lines[0]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama")


def scan(folder: Path, store: Path, *words: str | Path) -> Result:
    return run("scan", "heads", "--model", folder, "--store", store, "--limit", "16", *words)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_missing_model_folder(tmp_path):
    assert_one_line(run("scan", "heads", "--model", tmp_path / "nothing", "--store", tmp_path / "s"), "nothing")


def test_unknown_family(tmp_path, tiny_folder):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert_one_line(scan(folder, tmp_path / "s"), "family 'bloom'", "families.py")


def test_adapter_for_another_base(tmp_path, tiny_folder):
    adapted = get_peft_model(tiny_model("gpt2", dtype=torch.float32), LoraConfig(r=2, target_modules=["c_attn"]))
    adapted.save_pretrained(tmp_path / "adapter")
    assert_one_line(scan(tiny_folder, tmp_path / "s", "--adapter", tmp_path / "adapter"), "adapter", "another base")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (['{"text": "1 + 2 =", "answer": "3"}', '{"text": "1 + 3 ="}'], ["line 2", "answer"]),
        (['{"text": "1 + 2 =", "answer": "3"}', "{oh no"], ["line 2", "JSON"]),
    ],
)
def test_faulty_prompt_file(tmp_path, tiny_folder, lines, parts):
    file = write(tmp_path / "prompts.jsonl", *lines)
    assert_one_line(scan(tiny_folder, tmp_path / "s", "--prompts", file), "prompts.jsonl", *parts)


def test_answer_that_merges_into_the_prompt(tmp_path, tiny_folder):
    file = write(tmp_path / "p.jsonl", '{"text": "seven", "answer": "teen", "separator": ""}')
    assert_one_line(scan(tiny_folder, tmp_path / "s", "--prompts", file), "separator")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--layers", "9"], ["layer 9 does not exist", "0 to 2"]),
        (["--heads", "0.7"], ["head 0.7 does not exist", "0 to 3"]),
        (["--heads", "0-7"], ["cannot be read", "layer.head"]),
        (["--layers", "3-1"], ["cannot be read"]),
        (["--ablation", "half"], ["half", "'zero', 'mean', 'resample'"]),
        (["--scoring", "half"], ["half", "first_token"]),
        (["--engine", "warp"], ["warp", "packed"]),
        (["--prompts", "nonsense"], ["nonsense", "two_digit"]),
        pytest.param(["--gpus-per-replica", "1"], ["--gpus-per-replica"], marks=WITHOUT_GPU),
        (["--replicas", "0"], ["--replicas"]),
        (["--dtype", "int3"], ["int3", "float32"]),
        (["--limit", "0"], ["limit"]),
        (["--limit", "few"], ["--limit", "few", "--help"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--bogus"], ["--bogus", "scan heads --help"]),
        (["--heads", "0.1", "--layers", "0"], ["--heads and --layers", "give one of them"]),
    ],
)
def test_values_that_do_not_exist(tmp_path, tiny_folder, words, parts):
    assert_one_line(scan(tiny_folder, tmp_path / "s", *words), *parts)


def test_store_that_is_a_file(tmp_path, tiny_folder):
    assert_one_line(scan(tiny_folder, write(tmp_path / "file", "x")), "file")


@pytest.mark.slow
def test_sql_without_a_store_and_with_a_mistake(tmp_path):
    assert_one_line(run("sql", "--store", tmp_path / "none", "SELECT 1"), "no store")
    assert_one_line(run("sql", "--store", tmp_path, "SELECT 1"), "no store")
    assert list(tmp_path.iterdir()) == []  # a folder that is no store is left alone
    fill(Store(tmp_path), [prompt("1")], [{"prompt_id": "1"}])
    assert_one_line(run("sql", "--store", tmp_path, "SELECT nothing FROM nowhere"), "nowhere")
    assert "head_effects" in run("sql", "--store", tmp_path).stdout


def test_brackets_in_a_table_are_text(tmp_path):
    """rich would take them for markup: a column's name vanished, and a tag that closes nothing was a traceback."""
    fill(Store(tmp_path), [prompt("1")], [{"prompt_id": "1"}])
    query = "SELECT 1 AS \"[red]loss\", '[/b]' AS \"[/b]\", '[x]' AS c"
    shown = run("sql", "--store", tmp_path, query).stdout
    assert "[red]loss" in shown
    assert shown.count("[/b]") == 2
    assert "[x]" in shown


def test_sql_prints_one_json_array(tmp_path):
    fill(Store(tmp_path), [prompt("1"), prompt("2")], [{"prompt_id": "1"}, {"prompt_id": "2"}])
    printed = run("sql", "--json", "--store", tmp_path, "SELECT prompt_id FROM baseline ORDER BY ALL").stdout
    assert json.loads(printed) == [{"prompt_id": "1"}, {"prompt_id": "2"}]
    assert json.loads(run("sql", "--json", "--store", tmp_path, "SELECT 1 AS n WHERE false").stdout) == []


@pytest.mark.ray
@pytest.mark.own_ray
def test_a_scan_its_tables_and_its_resumption(tmp_path, tiny_folder):
    """One real run through Ray; then the same command again, and a half-written file beside the results."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "mathinterp", "scan", "heads", "--model", str(tiny_folder),
               "--store", str(store), "--limit", "16", "--replicas", "1"]  # fmt: skip
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "Accuracy cannot rank heads here" in first.stdout, "a random model is never right"
    assert "paper_a_table1" in first.stdout

    count = ["sql", "--json", "--store", store, ROWS_AND_HEADS]
    tokens = json.loads(run("sql", "--json", "--store", store, SCORED_TOKENS).stdout)[0]["n"]
    rows = [{"n": 12 * tokens, "heads": 12}]  # a row for each head and scored answer token of 16 prompts
    assert tokens >= 16
    assert json.loads(run(*count).stdout) == rows

    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "nothing left to compute" in again.stdout
    found = json.loads(scan(tiny_folder, store, "--json").stdout)
    assert (found["shards_done"], found["shards_reused"]) == (0, found["shards"])
    assert json.loads(run(*count).stdout) == rows

    shard = next(store.glob("head_scan/*/*.parquet"))
    shard.with_name("shard-09999.parquet").write_bytes(shard.read_bytes()[:100])
    warned = run(*count)
    assert warned.stderr.count("shard-09999.parquet") == 1
    assert warned.stderr.startswith("warning: ")
    assert json.loads(warned.stdout) == rows


def test_nan_weights(tmp_path, tiny_folder):
    folder = tmp_path / "nan"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_one_line(run("selftest", "--model", folder), "model.norm.weight", "NaN")


@pytest.mark.slow
def test_plan_counts_what_a_scan_would_store(tiny_folder):
    planned = json.loads(run("plan", "heads", "--model", tiny_folder, "--limit", "400", "--json").stdout)
    assert planned["evaluations"] == 400 * (12 + 1)
    assert planned["nodes"] < planned["tokens"]
    devices = {row["device"]: row for row in planned["devices"]}
    assert (devices["H100"]["dtype"], devices["this CPU"]["dtype"]) == ("bfloat16", "float32")  # what auto means there
    assert 0 < devices["H100"]["seconds"] < devices["this CPU"]["seconds"]
    assert devices["this CPU"]["model_bytes"] == 2 * devices["H100"]["model_bytes"]
    shown = run("plan", "mlps", "--model", tiny_folder, "--limit", "8").stdout
    assert "positions of a clean pass" in shown
    assert f"mathinterp scan mlps --model {tiny_folder} --limit 8" in shown


@pytest.mark.slow
def test_prompts_as_the_model_sees_them(tmp_path, tiny_folder):
    shown = run("prompts", "--model", tiny_folder, "--limit", "4")
    assert "4 prompts" in shown.stdout
    assert "two_digit" in run("prompts", "--list").stdout
    out = tmp_path / "pairs.jsonl"
    assert run("prompts", "--limit", "4", "--counterfactuals", "--out", out).exit_code == 0
    assert all(json.loads(line)["counterfactual"] for line in out.read_text().splitlines())


@pytest.mark.slow
def test_selftest_holds_on_a_tiny_model(tiny_folder):
    result = run("selftest", "--model", tiny_folder, "--dtype", "float64", "--json")
    checks = json.loads(result.stdout)["checks"]
    assert len(checks) == 12
    assert_one_line(run("selftest", "--model", tiny_folder, "--limit", "0"), "limit")
    for check in checks:  # by hand in float64, while Llama's norms compute in float32 whatever they are given
        assert check["holds"], check
        by_hand = "by hand" in check["identity"] or "lens" in check["identity"]
        assert check["largest difference"] < (1e-5 if by_hand else 1e-9), check


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, click.Command]]:
    found = []
    for name, command in group.commands.items():
        found.append((" ".join((*path, name)), command))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize(("name", "command"), commands(main))
def test_every_command_and_option_is_explained(name, command):
    assert "Example" in (command.help or ""), f"{name} has no example"
    assert f"mathinterp {name.split()[0]}" in (command.help or "")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} has no help"


@pytest.mark.parametrize("width", [40, 2000])
def test_no_number_is_ever_cut_off(monkeypatch, capsys, width):
    monkeypatch.setattr("mathinterp.cli.output.console", Console(width=width))
    row = {f"a_long_column_{i}": 1000.5 + i for i in range(12)}
    print_table([row], title="A title that is longer than forty characters, and stays on one line")
    printed = capsys.readouterr().out
    assert printed.startswith("A title that is longer than forty characters, and stays on one line\n")
    assert all(f"{value:.4g}" in printed and name in printed for name, value in row.items())


def test_store_that_cannot_be_written(tmp_path, tiny_folder):
    file = write(tmp_path / "file", "x")
    assert_one_line(scan(tiny_folder, file / "store"), "not writable", "--store")


def test_a_cluster_without_replicas_ends_in_one_line(tmp_path, tiny_folder, monkeypatch):
    def none_left(*_: object, **__: object) -> None:
        raise NoReplicaLeft("no replica is left to run 2 shards: out of memory")

    monkeypatch.setattr("mathinterp.cluster.run.run_scan", none_left)
    result = scan(tiny_folder, tmp_path / "s")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "no replica is left to run 2 shards" in result.stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["scan", "heads"], "--store 'results'"),
        (["tune", "precise", "--data", "d", "--store", "memory://s", "--out", "./tuned"], "--out 'tuned'"),
        (["tune", "lora", "--data", "d", "--store", "/s", "--out", "/tuned", "--storage", "c"], "--storage 'c'"),
    ],
)
def test_a_job_keeps_nothing_in_the_folder_it_was_uploaded_to(tmp_path, monkeypatch, words, option):
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    urls = "" if option.startswith("--out") else " or an s3:// or gs:// URL"
    result = run(*words)
    assert_one_line(result, option)
    assert result.stderr.endswith(f"deletes after it; give a full path{urls}\n")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("words", [["runs", "list"], ["sql", "SELECT 1"], ["scan", "heads"], ["serve", "start"]])
def test_a_folder_that_was_deleted_meanwhile_is_told_in_one_line(tmp_path, monkeypatch, words):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_one_line(run(*words), "the current folder is not there any more")


def test_a_job_names_its_store_as_it_can_be_typed_elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    store = str(tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    assert place(store) == "kept"
    monkeypatch.chdir(folder)
    assert (place(store), store_option(store)) == (store, f" --store {store}")


@pytest.mark.parametrize(
    ("words", "likely"),
    [
        (["scn"], "'scan'"),
        (["headz"], "'scan heads'"),
        (["scan", "headz"], "'heads'"),
        (["plan", "prob"], "'probe'"),
        (["tune", "prcise"], "'precise'"),
        (["scan", "heads", "--modle", "x"], "'--model'"),
        (["prompts", "--prompts", "two_digt"], "'two_digit'"),
        (["prompts", "--model", "random:llama-2-7c"], "'llama-2-7b'"),
        (["prompts", "--adapter", "smollm2-arithmetics"], "'smollm2-arithmetic'"),
        (["prompts", "--model", "bundeld"], "'bundled'"),
    ],
)
def test_a_misspelt_name_gets_the_likely_one(words, likely, monkeypatch):
    def offline(*_: object, **__: object) -> None:
        raise OSError("no hub here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert_one_line(run(*words), f"Did you mean {likely}?")


def test_a_name_like_no_other_is_refused_without_a_guess():
    result = run("zzzzz")
    assert_one_line(result, "there is no command 'zzzzz'. See")
    assert "Did you mean" not in result.stderr


def test_help_lists_every_command_under_its_workflow_in_a_whole_sentence():
    shown = run("--help").stdout
    placed = [name for names in Commands.sections.values() for name in names]
    assert sorted(placed) == sorted(main.list_commands(click.Context(main)))
    assert [line.rstrip(":") for line in shown.splitlines() if line.rstrip(":") in Commands.sections] == [
        *Commands.sections
    ]
    context = click.Context(main)
    for group in (main, main.get_command(context, "scan"), main.get_command(context, "tune")):
        for name in group.list_commands(context):
            sentence = group.sentence_of(context, name)
            assert sentence == first_sentence(group.get_command(context, name))
            assert sentence[0].isupper(), (name, sentence)
            assert sentence.endswith(".")
            assert "..." not in sentence


@pytest.fixture
def small_store(tmp_path, monkeypatch):
    """The current folder has a finished head scan in ``store``."""
    monkeypatch.chdir(tmp_path)
    heads = [{"layer": 0, "head": head, "prompt_id": p} for head in (0, 1) for p in ("1", "2")]
    fill(Store("store"), [prompt("1"), prompt("2")], [{"prompt_id": "1"}, {"prompt_id": "2"}], heads)
    return tmp_path / "store"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "after"])
def test_quiet_leaves_results_and_errors_only(small_store, where):
    (small_store / "baseline" / "run_id=x").mkdir()
    (small_store / "baseline" / "run_id=x" / "shard-00000.parquet").write_bytes(b"half")
    words = ["sql", "--store", small_store]
    query = [*words, "SELECT * FROM baseline"]
    assert "warning: " in run(*query).stderr
    quiet = run("-q", *words) if where == "before" else run(*words, "--quiet")
    assert quiet.stderr == ""
    assert "head_effects" in quiet.stdout
    assert "Results:" not in quiet.stdout
    assert_one_line(run("-q", *words, "SELECT nothing FROM nowhere"), "nowhere")
    assert "warning: " in run(*query).stderr  # the next command is told again


def test_verbose_shows_where_an_error_comes_from(tmp_path):
    words = ["sql", "--store", tmp_path / "none", "SELECT 1"]
    assert_one_line(run(*words), "no store")
    shown = run("-v", *words)
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("mathinterp: there is no store")


@pytest.mark.slow
def test_the_last_line_says_where_the_results_are_and_how_to_see_more(small_store):
    last = run("sql", "--store", small_store).stdout.splitlines()[-1]
    assert last == "Results: store (see more: 'mathinterp sql --store store', 'mathinterp report --store store')"
    assert "Results:" not in run("sql", "--store", small_store, "--json").stdout


def test_a_run_is_followed_by_where_it_is_once(small_store, monkeypatch):
    monkeypatch.chdir(small_store.parent)
    (found,) = Store("store").rows("SELECT run_id FROM runs")
    finished = RunSummary(found["run_id"], str(small_store), 2, 2, 0, 0, 0, 0.1, None, 0, 0, 0.0, 0)

    @click.command()
    def again() -> None:
        print_sql_hint(str(small_store), ["SELECT 1"])
        print_run(finished)
        print_run(finished)

    lines = CliRunner().invoke(again).stdout.splitlines()
    assert [line for line in lines if line.startswith("Results: store (")] == [lines[-1]]
    assert '  mathinterp sql --store store "SELECT 1"' in lines


def test_a_traceback_is_said_to_be_in_the_record_where_it_is(tmp_path, capsys):
    raised = ShardFailure("mlp_scan/00001", "ValueError: no", "Traceback", 3, 0)
    died = ShardFailure("mlp_scan/00002", "its replica died 5 times: killed", "", 0, 5)
    print_run(RunSummary("r", str(tmp_path), 2, 0, 0, 0, 0, 0.1, None, 0, 0, 0.0, 0, failed=[raised, died]))
    assert capsys.readouterr().err.splitlines()[:2] == [
        "shard mlp_scan/00001 was given up: ValueError: no (traceback in the run's record)",
        "shard mlp_scan/00002 was given up: its replica died 5 times: killed",
    ]


def test_plan_and_scan_know_every_experiment():
    context = click.Context(main)
    shown = {name for name, each in experiments().items() if each.on_command_line}
    for group in ("plan", "scan"):
        assert shown <= set(main.get_command(context, group).list_commands(context))
