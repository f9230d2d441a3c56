"""``mi.tune`` and ``mi.evaluate``: the same runs as the commands of these names, and mistakes in one line."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.evaluation import jobs
from mathinterp.models.catalog import load
from mathinterp.models.spec import ModelSpec
from mathinterp.models.units import Neuron
from mathinterp.tuning import finetune, pruning, sweep
from tests.json_lines import write
from tests.tiny import save_tiny


class Stopped(Exception):
    """Where work would begin."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama"))


@pytest.fixture
def begun(monkeypatch) -> list[Any]:
    """What would have been computed: the first argument of every workflow that stops where its work begins."""
    found: list[Any] = []

    def stop(first: Any, *_: Any, **__: Any) -> None:
        found.append(first)
        raise Stopped

    for room, name in ((finetune, "run_tuning"), (sweep, "run_sweep"), (pruning, "run_pruning"), (jobs, "run_scan")):
        monkeypatch.setattr(room, name, stop)
    return found


def cli(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def identity(begun: Any) -> Any:
    """What decides the rows: a training's run id; else the plan or scan, but for where it is computed."""
    settings = {name: value for name, value in vars(getattr(begun, "settings", begun)).items() if name != "address"}
    if isinstance(begun, finetune.Prepared):
        return begun.tuning.run_id
    if isinstance(begun, sweep.SweepPlan):
        return begun.scan.parameters(), begun.base.fingerprint, settings
    if isinstance(begun, pruning.PrunePlan):
        return settings, begun.layer, begun.deep, begun.top, begun.config.parameters()
    return begun.parameters()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (
            "tune precise --heads 1.0,2.1 --mlps 1",
            lambda base, **shared: mi.tune.precise(base, heads=["1.0", (2, 1)], mlps=[1], **shared),
        ),
        (
            "tune precise --heads 1.0 --lr 0.01",
            lambda base, **shared: mi.tune.precise(base, heads="1.0", lr=1e-2, **shared),
        ),
        ("tune lora --rank 4", lambda base, **shared: mi.tune.lora(base, rank=4, **shared)),
        (
            "tune lora --layers 1 --targets mlp",
            lambda base, **shared: mi.tune.lora(base, layers=(1,), targets="mlp", **shared),
        ),
        ("tune full --layers 1", lambda base, **shared: mi.tune.full(mi.load(base), layers=(1,), **shared)),
        ("tune full --lr 0.01", lambda base, **shared: mi.tune.full(base, lr=1e-2, **shared)),
        ("tune sweep --rank 4", lambda base, **shared: mi.tune.sweep(base, rank=4, **shared)),
        ("tune prune --top 3", lambda base, **shared: mi.tune.prune(base, top=3, **shared)),
    ],
)  # fmt: skip
def test_python_asks_for_the_run_that_the_command_asks_for(words, call, base, begun, tmp_path):
    sums = [{"text": f"{i} plus 1 is", "answer": str(i + 1), "operation": "add"} for i in range(8)]
    data, out, store = write(tmp_path / "data.jsonl", *sums), tmp_path / "out", tmp_path / "store"
    shared: dict[str, Any] = {"data": str(data), "steps": 3, "batch": 4, "out": out, "store": str(store)}
    places = ["--model", base, "--data", data, "--steps", 3, "--batch", 4, "--out", out, "--store", store]
    if words.split()[1] in ("sweep", "prune"):
        shared |= {"test": str(data), "cases": str(data)}
        places += ["--test", data, "--cases", data]
    if "sweep" in words:
        shared |= {"validation": 2}
        places += ["--validation", 2]
    with pytest.raises(Stopped):
        call(base, **shared)
    assert isinstance(cli(*words.split(), *places).exception, Stopped)
    python, command = begun
    assert identity(python) == identity(command)


@pytest.mark.parametrize("progress", [True, False])
def test_bars_of_a_sweep_and_a_pruning_can_be_turned_off(base, tmp_path, monkeypatch, progress):
    """Every run on the way is told."""
    told: list[bool] = []

    def run_scan(scan: Any, *_: Any, progress: bool, **__: Any) -> Any:
        told.append(progress)
        return SimpleNamespace(complete=True, run_id="0" * 12, store=str(tmp_path / "store"))

    def trained(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(out=tmp_path, run_id="0" * 12)

    monkeypatch.setattr(sweep, "run_scan", run_scan)
    for room in (sweep, pruning):
        monkeypatch.setattr(room, "connection", lambda address: nullcontext())
    monkeypatch.setattr(sweep, "chosen_trials", lambda results: ((0, 1e-3),))
    monkeypatch.setattr(sweep, "missing_adapters", lambda folder, trials: [])
    monkeypatch.setattr(pruning, "_train_lora", trained)
    monkeypatch.setattr(pruning, "_kept", lambda results: (Neuron(2, 0),))
    monkeypatch.setattr(pruning, "_pruned_conditions", lambda *_: [])
    data = str(write(tmp_path / "data.jsonl", *({"text": f"{i} plus 1 is", "answer": str(i + 1)} for i in range(8))))
    asked = {"data": data, "test": data, "cases": data, "steps": 1, "store": str(tmp_path / "store")}
    mi.tune.sweep(base, out=tmp_path / "sweep", progress=progress, validation=2, **asked)
    mi.tune.prune(base, out=tmp_path / "prune", progress=progress, deep=(2,), top=1, **asked)
    assert told == [progress] * 4


def test_evaluate_asks_for_the_run_that_the_command_asks_for(base, begun, tmp_path):
    store = tmp_path / "store"
    with pytest.raises(Stopped):
        mi.evaluate("one_digit", base, store=str(store), limit=8, seed=1)
    words = ("evaluate", "--model", base, "--tasks", "one_digit", "--limit", 8, "--seed", 1, "--store", store)
    assert isinstance(cli(*words).exception, Stopped)
    python, command = begun
    assert identity(python) == identity(command)


def test_mistakes_are_one_line(base, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(mi.UserError, match=r"`step` is not known. Did you mean 'steps'\? There are heads, "):
        mi.tune.precise(base, heads="1.0", data="one_digit", step=3, out=out)
    with pytest.raises(mi.UserError, match="`data` is missing; give it"):
        mi.tune.lora(base, out=out)
    with pytest.raises(mi.UserError, match="`steps`"):
        mi.tune.lora(base, data="one_digit", steps=0, out=out)
    with pytest.raises(mi.UserError, match=r"`limits` is not known. Did you mean 'limit'\?"):
        mi.evaluate("one_digit", base, limits=3)
    held = load(ModelSpec(base), "cpu")
    wrapped = mi.wrap(held.model, held.tokenizer, name="mine")
    for call in (mi.tune.precise, mi.tune.lora, mi.tune.full, mi.tune.sweep, mi.tune.prune, mi.tune.zero):
        with pytest.raises(mi.UserError, match="model 'mine' is in memory alone, and this needs its folder"):
            call(wrapped, out=out, **({} if call is mi.tune.zero else {"data": "one_digit"}))
    with pytest.raises(mi.UserError, match="model 'mine' is in memory alone"):
        mi.evaluate("one_digit", wrapped)
    assert not out.exists()


def test_a_model_with_heads_at_zero_answers_as_the_ablated_one(base, tmp_path):
    zeroed = mi.tune.zero(base, heads=["1.0", "2.1"], out=tmp_path / "zeroed")
    assert [str(head) for head in zeroed.heads] == ["1.0", "2.1"]
    prompts = mi.prompts("one_digit", limit=8)
    written = mi.ablate(mi.load(str(tmp_path / "zeroed"), device="cpu"), prompts, mlps=[0], value=1.0).rows
    ablated = mi.ablate(mi.load(base, device="cpu"), prompts, heads=["1.0", "2.1"]).rows
    assert written["logprob"].to_numpy() == pytest.approx(ablated["logprob"].to_numpy(), abs=1e-5)


@pytest.mark.ray
def test_heads_are_tuned_merged_and_found_again(base, tmp_path):
    data = write(tmp_path / "data.jsonl", *({"prompt": f"{i} plus 1 is", "response": str(i + 1)} for i in range(8)))
    told: list[str] = []
    shared: dict[str, Any] = {"data": str(data), "steps": 2, "batch": 4, "gpu": False, "store": str(tmp_path / "store")}
    first = mi.tune.precise(base, heads="1.0", out=tmp_path / "tuned", say=told.append, **shared)
    again = mi.tune.precise(base, heads="1.0", out=tmp_path / "tuned", **shared)
    assert (first.trained_now, again.trained_now) == (True, False)
    assert first.run_id == again.run_id
    assert "heads that train: 1.0" in told
    assert isinstance(mi.tune.merge(first.out, base, out=tmp_path / "merged"), Path)
    prompts = mi.prompts("one_digit", limit=4)
    merged, adapted = (
        mi.ablate(model, prompts, heads=["0.0"]).rows["logprob"]
        for model in (mi.load(str(tmp_path / "merged")), mi.load(base, adapter=str(first.out)))
    )
    assert (merged == adapted).all()
