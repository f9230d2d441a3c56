"""Workflows whose scans a service computes: rows and run ids of those without it, and what stays here is named."""

import json
import runpy
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cli.reference import commands
from mathinterp.cluster.local_workers import LocalWorkers
from mathinterp.connected import Service
from mathinterp.errors import Unfinished, UserError
from mathinterp.models.spec import ModelSpec
from mathinterp.prompts import gender, prompts_of
from mathinterp.service.attached import HERE, Workers
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.workflows import reproduce as reproduction
from mathinterp.workflows.edit import edit_gender
from mathinterp.workflows.pipeline import NamedPrompts, Pipeline, run_pipeline
from mathinterp.workflows.reproduce import plan_reproduction, reproduce
from mathinterp.workflows.trainings import Training
from tests.gender_reader import save_reader
from tests.service_case import served
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
SUMS = [
    ("3 plus 5 is", "add", "3", "5"), ("6 plus 2 is", "add", "6", "2"), ("9 minus 1 is", "sub", "9", "1"),
    ("2 times 4 is", "mul", "2", "4"),
]  # fmt: skip
NOWHERE = "http://127.0.0.1:9"
STAY = {"evaluate", "tune full", "tune lora", "tune precise", "tune prune", "tune sweep"}  # what no service computes


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with served(2) as (url, _, _):
        yield mi.connect(url, user="ada")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that answers 8, which is right: the MLP probe reads prompts that are answered right."""
    folder = tmp_path_factory.mktemp("eight")
    tiny, tokenizer = tiny_model("llama", dtype=torch.float32), tiny_tokenizer(["followed"])
    ends = [tiny.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1] for text, *_ in SUMS]
    (eight,) = tokenizer("8", add_special_tokens=False)["input_ids"]
    tiny.lm_head.weight[eight] = torch.stack(ends).mean(0)
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    same = {"answer": "8", "distractor": "7"}
    rows = [{"text": t, "operation": o, "operand_a": a, "operand_b": b, **same} for t, o, a, b in SUMS]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No shard is computed by this process, and no Ray is asked."""
    monkeypatch.setattr(LocalWorkers, "__init__", lambda *_: pytest.fail("computed here"))
    monkeypatch.setattr("mathinterp.cluster.ray_cluster.connection", lambda *_: pytest.fail("Ray was asked"))
    return monkeypatch


def command(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def computed(service: Service) -> int:
    """Requests that the service's models have answered."""
    return sum(row["requests"] for row in service.status()["models"])


def assert_same_rows(one: Path, other: Path) -> None:
    """Every table, bit for bit, and so every run id."""
    stores = [Store(place) for place in (one, other)]
    ids = [store.rows("SELECT run_id, status FROM runs ORDER BY ALL") for store in stores]
    assert ids[0] == ids[1]
    assert {row["status"] for row in ids[0]} == {"finished"}
    filled = [name for name in catalog().tables if any(one.glob(f"{name}/**/*.parquet"))]
    assert filled
    for name in filled:
        first, second = (store.arrow(f"SELECT * FROM {name} ORDER BY ALL") for store in stores)
        assert first.num_rows > 0
        assert first.equals(second), name


@pytest.mark.slow
def test_the_job_of_the_pipeline_asks_a_service_for_every_stage(
    service: Service, model: str, prompts: Path, tmp_path: Path, nothing_here: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As a Ray job: the script puts --address before what it is given, and --service goes before that."""
    asked, own = Pipeline(top=1, ks=(1,), control_seeds=1), NamedPrompts(str(prompts), prompts_of(str(prompts)))
    words = ["--model", model, "--prompts", str(prompts), "--transfer", "", "--top", "1", "--ks", "1", "--json",
             "--control-seeds", "1", "--store", str(tmp_path / "there"), "--service", service.requests.url]  # fmt: skip
    before = computed(service)
    nothing_here.setattr("sys.argv", ["pipeline.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "ray_jobs" / "pipeline.py"), run_name="__main__")
    assert ended.value.code == 0
    assert computed(service) > before
    told = json.loads(capsys.readouterr().out)["runs"]
    nothing_here.undo()
    here = run_pipeline(asked, ModelSpec(model), own, [], Store(tmp_path / "here"), HERE)
    assert told == here.runs.named
    assert len(told) == 5
    assert_same_rows(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_a_league_asks_a_service_for_every_stage(
    service: Service, model: str, prompts: Path, tmp_path: Path, nothing_here: pytest.MonkeyPatch
) -> None:
    given = prompts_of(str(prompts))
    before, store = computed(service), str(tmp_path / "there")
    there = service.league(model, given, methods=["atp"], store=store)
    assert computed(service) > before
    nothing_here.setenv("MATHINTERP_SERVICE", service.requests.url)  # of which the command is told that way, too
    words = ["--model", model, "--prompts", prompts, "--methods", "atp", "--store", store, "--json"]
    again = command("league", *words)
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["run_id"] == there.id
    assert again.stderr.count("was there already") == 5
    nothing_here.undo()
    here = mi.league(model, given, methods=["atp"], store=str(tmp_path / "here"))
    assert (here.id, here.runs) == (there.id, there.runs)
    assert_same_rows(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_the_gender_edit_asks_a_service_and_says_who_writes_the_model(
    service: Service, tmp_path: Path, nothing_here: pytest.MonkeyPatch
) -> None:
    professions = {"woman": ("nurse",), "man": ("miner", "police")}
    nothing_here.setattr(gender, "PROFESSIONS", professions)
    nothing_here.setattr(gender, "TEMPLATES", gender.TEMPLATES[:2])
    reader, text = str(save_reader(tmp_path / "model")), tmp_path / "text.txt"
    text.write_text("one two three\n\nfour five")
    words = ["--model", reader, "--top", "3", "--control-seeds", "1", "--text", text, "--store", tmp_path / "there"]
    before = computed(service)
    done = command("edit", *words, "--service", service.requests.url, "--out", tmp_path / "edited")
    assert done.exit_code == 0, done.output
    assert computed(service) > before
    assert "the edited model was written by this process, not by the service\n" in done.stderr
    assert (tmp_path / "edited" / "edit.json").is_file()
    nothing_here.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gender, "PROFESSIONS", professions)
        patch.setattr(gender, "TEMPLATES", gender.TEMPLATES[:2])
        edit_gender(ModelSpec(reader), str(tmp_path / "here"), top=3, control_seeds=1, text=text)
    assert_same_rows(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_a_reproduction_asks_a_service_for_scans_and_names_what_it_trains_here(
    service: Service, model: str, tmp_path: Path, nothing_here: pytest.MonkeyPatch
) -> None:
    places: list[dict[str, Any]] = []

    def train(name: str, training: Training, say: Any) -> dict[str, str]:
        places.append(training.place)
        raise UserError(f"{name} is left to other tests")

    nothing_here.setattr(reproduction, "train", train)
    words = ["--model", model, "--only", "a-table3", "--only", "a-table11", "--prompts-limit", "8", "--steps", "5",
             "--store", tmp_path / "there", "--trained", tmp_path / "trained", "--json",
             "--service", service.requests.url]  # fmt: skip
    before = computed(service)
    done = command("reproduce", *words, "--address", "1.2.3.4:6379", "--gpus-per-replica", "0.5", "--replicas", "3")
    assert done.exit_code == 0, done.output
    assert computed(service) > before
    assert "\nnot asked of the service, run as without it: prune\n" in done.stderr
    assert places == [{"replicas": 3, "gpus_per_replica": 0.5, "address": "1.2.3.4:6379"}]
    nothing_here.undo()
    here = reproduce(model, str(tmp_path / "here"), only=("a-table3",), limit=8, steps=0)
    assert here.runs
    assert_same_rows(tmp_path / "here", tmp_path / "there")
    place = Workers(service=service.requests)
    plan = plan_reproduction(model, str(tmp_path / "there"), only=("a-table3",), limit=8, steps=0, place=place)
    assert all(stage.finished for stage in plan.stages)


@pytest.mark.slow
def test_a_service_that_ends_between_two_stages_is_no_reason_to_leave_one_out(model: str, tmp_path: Path) -> None:
    store, seen = str(tmp_path / "store"), []
    with ExitStack() as stack:
        url, _, _ = stack.enter_context(served(1))

        def told(stage: str, run: Any) -> None:
            seen.append(stage)
            stack.close()

        with pytest.raises(Unfinished, match="does not answer any more"):
            reproduce(
                model, store, only=("a-table1", "a-table24"), limit=8, steps=0, place=Workers(service=url), told=told
            )
    assert len(seen) == 1


@pytest.mark.parametrize(
    "words",
    [
        "pipeline", "league", "edit", pytest.param("reproduce --steps 0", marks=pytest.mark.slow), "mib evaluate",
        "chain",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line_before_anything_is_written(
    service: Service, model: str, tmp_path: Path, nothing_here: pytest.MonkeyPatch, words: str
) -> None:
    given = [*words.split(), "--model", model, "--store", tmp_path / "store"]
    given += ["--from", "0123456789ab"] if words == "mib evaluate" else []
    given += ["--only", "a-table3"] if words.startswith("reproduce") else []
    for more, said in (
        (["--service", service.requests.url, "--gpus-per-replica", "0"], "--gpus-per-replica is said when the service"),
        (["--service", NOWHERE], f"no service answers at {NOWHERE}"),
        (["--service", "here"], "--service 'here': give a URL like"),
    ):
        done = command(*given, *more)
        assert done.exit_code == 2, done.output
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "store" / "runs").exists()


def test_a_model_that_a_service_cannot_be_asked_for_is_refused_not_run_here(
    service: Service, model: str, prompts: Path, tmp_path: Path, nothing_here: pytest.MonkeyPatch
) -> None:
    wrapped, place = mi.wrap(tiny_model("llama"), tiny_tokenizer(), name="mine"), Workers(service=service.requests)
    store, given = str(tmp_path / "store"), prompts_of(str(prompts))
    with pytest.raises(UserError, match="object in this process's memory"):
        service.league(wrapped, given, methods=["atp"], store=store)
    with pytest.raises(UserError, match="object in this process's memory"):
        reproduce(wrapped, store, only=("a-table3",), limit=8, steps=0, place=place)
    own = NamedPrompts("sums", given)
    with pytest.raises(UserError, match="runs no code of a model's folder"):
        run_pipeline(Pipeline(top=1, ks=(1,)), ModelSpec(model, trust_remote_code=True), own, [], Store(store), place)
    assert not Path(store, "runs").exists()


def test_every_command_that_computes_on_a_cluster_takes_a_service_or_is_named_as_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command without the option does not look at the variable either."""
    options = {name: {opt for each in command.params for opt in each.opts} for name, command in commands(main)}
    on_ray = {name for name, own in options.items() if {"--model", "--store", "--address"} <= own}
    assert {name for name in on_ray if "--service" not in options[name]} == STAY
    assert {"pipeline", "league", "edit", "reproduce", "mib evaluate", "chain"} <= on_ray - STAY
    page = (ROOT / "docs" / "service.md").read_text()
    for name in STAY:
        assert f"`{name.split()[0]}" in page
    asked: list[dict[str, Any]] = []
    monkeypatch.setenv("MATHINTERP_SERVICE", NOWHERE)
    monkeypatch.setattr("mathinterp.evaluation.jobs.evaluate", lambda *_, **given: asked.append(given) or 1 / 0)
    command("evaluate", "--tasks", "two_digit")
    assert "service" not in asked[0]
