"""Evaluation runs: shards, identities, the views with their paired tests, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.evaluation.evaluate import Origin, PromptSetEvaluation
from mathinterp.evaluation.evaluate.summary import summarize_evaluations
from mathinterp.evaluation.greedy import GreedyDecoder
from mathinterp.evaluation.harness import plain_greedy
from mathinterp.evaluation.jobs import Job, Settings, origin_of, own_ends, parse_tasks, prepare_jobs
from mathinterp.evaluation.task_files import TaskFile, task_file
from mathinterp.experiments.base import Subject
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.store.query import json_rows
from tests.small_benchmarks import SVAMP, lines, write_benchmarks
from tests.small_store import open_run
from tests.statistics_twin import Part, score_interval, score_p_value
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


# ---- scans ----


def benchmark(name: str, data: Path, **settings: Any) -> Job:
    spec = ModelSpec("random:llama-tiny")
    return prepare_jobs([name], spec, Settings(str(data), **settings))[0]


def test_scan_rows_are_the_items_in_order_whatever_the_blocks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mathinterp.evaluation.evaluate.CHOICE_BLOCK", 5)
    job = benchmark("mmlu", data, fewshot=2)
    anatomy_ = Anatomy(tiny_model("llama"))
    prompts = tokenize_prompts(
        [replace(p, text=p.prompt_id) for p in job.prompts], resolve(ModelSpec("random:llama-tiny")).tokenizer
    )
    shards = job.scan.shards(anatomy_.shape, prompts)
    assert [shard.work for shard in shards] == [
        {"start": 0, "stop": 5},
        {"start": 5, "stop": 10},
        {"start": 10, "stop": 12},
    ]
    state = job.scan.prepare(Subject(anatomy_, prompts, tokenizer=tiny_tokenizer("ABCD")))
    contexts = []
    answer = state.answer

    def spy(task: TaskFile, items: list[Any], examples: list[Any]) -> Any:
        contexts.append(({item["subject"] for item in items}, {example["subject"] for example in examples}))
        return answer(task, items, examples)

    monkeypatch.setattr(state, "answer", spy)
    tables = [job.scan.run(state, shard) for shard in shards]
    assert all(table.schema == job.scan.tables["evaluations"].schema for table in tables)
    rows = pa.concat_tables(tables).to_pylist()
    assert [row["item_id"] for row in rows] == [prompt.prompt_id for prompt in job.prompts]
    assert [row["subset"] for row in rows] == ["anatomy"] * 6 + ["us_history"] * 6
    assert all(asked == shown and len(asked) == 1 for asked, shown in contexts)
    assert sum(job.scan.evaluations(shard, prompts) for shard in shards) == 12
    assert job.scan.notes(state)["method"] == "base"


def test_the_run_is_named_by_what_changes_its_rows(data: Path, tmp_path: Path) -> None:
    def parameters(name: str = "svamp", **settings: Any) -> dict[str, Any]:
        return benchmark(name, data, **settings).scan.parameters()

    usual = parameters()
    assert (usual["setting"], usual["fewshot"], usual["limit"]) == ("", 8, None)
    assert parameters(seed=3) == usual  # own examples are not drawn
    assert parameters("gsm8k", seed=3) != parameters("gsm8k")
    assert parameters("gsm8k", seed=3)["setting"] == "seed=3"
    assert parameters(fewshot=0, limit=4)["setting"] == "limit=4 fewshot=0"
    assert parameters("gsm8k", examples="own")["setting"] == "examples=own"
    assert parameters("mmlu", examples="own") == parameters("mmlu")  # MMLU has one source
    different = [parameters(limit=4), parameters(fewshot=0), parameters(examples="train"), usual]
    assert len({json.dumps(found, sort_keys=True) for found in different}) == 4
    (tmp_path / "svamp").mkdir()
    changed_file = [*SVAMP[:-1], {**SVAMP[-1], "Answer": 11.0}]
    (tmp_path / "svamp" / "SVAMP.json").write_text(json.dumps(changed_file), encoding="utf-8")
    changed = prepare_jobs(["svamp"], ModelSpec("random:llama-tiny"), Settings(str(tmp_path)))[0].scan.parameters()
    assert {name for name in usual if usual[name] != changed[name]} == {"items"}
    limited = benchmark("mmlu", data, limit=4)
    assert {prompt.operation for prompt in limited.prompts} == {"anatomy", "us_history"}
    one = replace(task_file("svamp"), config={**task_file("svamp").config, "num_fewshot": 3})
    assert one.version != task_file("svamp").version


def test_prompt_sets_and_files_are_tasks_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(lines([{"text": "3 plus 5 is", "answer": "8"}]), encoding="utf-8")
    assert parse_tasks(f"csqa, two_digit,{file},CommonsenseQA") == ["commonsense_qa", "two_digit", str(file)]
    with pytest.raises(UserError, match="task 'svam' is not known; the benchmarks are gsm8k"):
        parse_tasks("svam")
    jobs = prepare_jobs(["two_digit", str(file)], ModelSpec(), Settings(limit=16, seed=2))
    assert [job.label for job in jobs] == ["two_digit limit=16 seed=2", "mine.jsonl limit=16"]
    assert isinstance(jobs[0].scan, PromptSetEvaluation)
    assert [shard.work for shard in replace(jobs[0].scan).shards(None, [None] * 1025)] == [
        {"start": 0, "stop": 512}, {"start": 512, "stop": 1024}, {"start": 1024, "stop": 1025},
    ]  # fmt: skip
    with pytest.raises(UserError, match="`examples` 'mine'"):
        prepare_jobs(["svamp"], ModelSpec(), Settings(examples="mine"))


@pytest.mark.slow
def test_what_a_model_was_made_from(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    own = resolve(ModelSpec(str(base))).fingerprint
    assert origin_of(ModelSpec(str(base))) == Origin(own, "base")
    tuned = save_tiny(tmp_path / "tuned", "llama", seed=1)
    (tuned / "tuning.json").write_text(json.dumps({"base_fingerprint": own, "method": "full"}), encoding="utf-8")
    assert origin_of(ModelSpec(str(tuned))) == Origin(own, "full")
    edited = save_tiny(tmp_path / "edited", "llama", seed=2)
    (edited / "edit.json").write_text(json.dumps({"base_fingerprint": own, "edit": "prune"}), encoding="utf-8")
    assert origin_of(ModelSpec(str(edited))) == Origin(own, "prune")
    (edited / "edit.json").write_text(json.dumps({"base_fingerprint": own}), encoding="utf-8")
    assert origin_of(ModelSpec(str(edited))) == Origin(own, "edited")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    about = {"base_fingerprint": own, "method": "precise"}
    (tmp_path / "adapter" / "tuning.json").write_text(json.dumps(about), encoding="utf-8")
    adapter = str(tmp_path / "adapter")
    assert origin_of(ModelSpec(str(base), adapter)) == Origin(own, "precise")
    other = resolve(ModelSpec(str(tuned))).fingerprint
    assert origin_of(ModelSpec(str(tuned), adapter)) == Origin(other, "precise of another base")
    smol = origin_of(ModelSpec("bundled"))
    assert smol == Origin(resolve(ModelSpec("bundled")).fingerprint, "base")


# ---- end tokens ----


def with_ends(folder: Path, ends: object, **more: Any) -> Path:
    """The folder, its generation_config.json saying that answers end at ``ends``."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, **more}), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_other_end_tokens_make_another_run_and_the_same_ones_do_not(data: Path, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")

    def asked(name: str) -> dict[str, Any]:
        return prepare_jobs([name], ModelSpec(str(folder)), Settings(str(data)))[0].scan.parameters()

    (folder / "generation_config.json").unlink()
    usual = {name: asked(name) for name in ("svamp", "two_digit", "commonsense_qa")}
    assert all("ends" not in parameters for parameters in usual.values())  # run ids from before it was looked at
    for same in (2, [2], None):  # config.json's own; None: the tokenizer's, which is the same here
        with_ends(folder, same, temperature=0.2, max_length=7)  # set aside: decoding is greedy
        assert {name: asked(name) for name in usual} == usual
    for ends in (5, [5, 2], [2, 5, 7]):
        with_ends(folder, ends)
        assert asked("svamp") == {**usual["svamp"], "ends": sorted(ends if isinstance(ends, list) else [ends])}
        assert asked("two_digit") == {**usual["two_digit"], "ends": asked("svamp")["ends"]}
        assert asked("commonsense_qa") == usual["commonsense_qa"]  # likelihoods: nothing is written that could end
    assert resolve(ModelSpec(str(folder))).fingerprint == resolve(ModelSpec(str(with_ends(folder, 2)))).fingerprint


def test_the_ends_in_the_identity_are_those_that_the_decoder_stops_at(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    for ends in (None, 5, [2, 9]):
        found = own_ends(resolve(ModelSpec(str(with_ends(folder, ends)))))
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        plain_greedy(loaded, AutoTokenizer.from_pretrained(folder))
        stops = loaded.generation_config.eos_token_id
        assert list(found or (2,)) == sorted(stops if isinstance(stops, list) else [stops])


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": []}', '{"eos_token_id": [true]}']
)
def test_a_broken_generation_config_is_refused(tmp_path: Path, content: str) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    (folder / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        prepare_jobs(["two_digit"], ModelSpec(str(folder)), Settings(limit=4))


def test_an_answer_ends_at_its_end_token_whatever_is_in_its_batch() -> None:
    """Also where the end token is an ordinary one, which padding then repeats."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    texts = [Prompt(str(i), f"{i} plus {i + 2} is", "7", "add") for i in range(1, 7)]
    prompts = tokenize_prompts(texts, tokenizer)
    free = [GreedyDecoder(model, tokenizer).answer([prompt])[0].response for prompt in prompts]
    end = tokenizer(free[0].split()[0], add_special_tokens=False)["input_ids"][0]  # written by one of them at once
    model.generation_config.eos_token_id = [2, end]
    model.generation_config.pad_token_id = tokenizer.pad_token = None
    decoder = GreedyDecoder(model, tokenizer)
    alone = [decoder.answer([prompt])[0].response for prompt in prompts]
    assert alone[0] == ""
    assert len(set(alone)) > 1
    assert [answer.response for answer in decoder.answer(prompts)] == alone


# ---- views and the command ----


def fill(store: Store, model: str, task: str, hits: str, method: str = "base", base: str = "b", **changes: Any) -> str:
    """A run of ``task`` on ``model`` with one item a character of ``hits``: 1 right, 0 wrong."""
    parameters = {
        "task": task,
        "version": "1",
        "fewshot": 8,
        "examples": "e",
        "items": "i",
        "limit": None,
        "setting": "",
        **changes,
    }
    run = open_run(
        store, ["evaluations/00000"], scan="evaluate", model=model, model_fingerprint=model, parameters=parameters
    )  # fmt: skip
    run.note({"base_fingerprint": base, "method": method})
    rows = [
        {"task": task, "subset": "odd" if i % 2 else "even", "item_id": str(i), "correct": hit == "1", "response": "r",
         "predicted": None if i == 0 else "1", "target": "1", "logprob": None, "truncated": i == 1}
        for i, hit in enumerate(hits)
    ]  # fmt: skip
    store.write_shard(
        run.run_id, "evaluations", 0, pa.Table.from_pylist(rows, catalog().tables["evaluations"].schema), {}
    )
    assert run.finish() == []
    return run.run_id


@pytest.mark.slow
def test_views_by_hand(tmp_path: Path) -> None:
    store = Store(tmp_path)
    before, after = "1111100000" * 4, "1111011110" * 3 + "1111111111"
    base = fill(store, "b", "svamp", before)
    tuned = fill(store, "b+precise", "svamp", after, "precise")
    fill(store, "b", "mmlu", "1100")
    fill(store, "b+precise", "mmlu", "1100", "precise")
    other = fill(store, "b+precise", "svamp", "1111", "precise", items="limited", setting="limit=4")
    con = store.connect()  # once: every query of a store makes all views anew

    def ask(sql: str) -> list[dict[str, Any]]:
        return json_rows(con.sql(sql).to_arrow_table())

    (score,) = ask(f"SELECT * FROM evaluation_scores WHERE run_id = '{tuned}' AND subset = 'all'")
    n, p = 40, after.count("1") / 40
    wilson = binomtest(after.count("1"), 40).proportion_ci(0.95, "wilson")
    assert (score["n"], score["accuracy"], score["unread"], score["truncated"]) == (40, pytest.approx(p), 1, 1)
    assert (score["low"], score["high"]) == pytest.approx((wilson.low, wilson.high))
    assert score["macro"] == pytest.approx((after[::2].count("1") / 20 + after[1::2].count("1") / 20) / 2)
    parts = ask(f"SELECT subset, n FROM evaluation_scores WHERE run_id = '{tuned}' AND subset <> 'all' ORDER BY 1")
    assert parts == [{"subset": "even", "n": 20}, {"subset": "odd", "n": 20}]
    gained = sum(x == "0" and y == "1" for x, y in zip(before, after, strict=True))
    lost = sum(x == "1" and y == "0" for x, y in zip(before, after, strict=True))
    (pair,) = ask(f"SELECT * FROM evaluation_pairs WHERE run_id = '{base}' AND other_run_id = '{tuned}'")
    assert (pair["gained"], pair["lost"], pair["difference"]) == (gained, lost, pytest.approx((gained - lost) / 40))
    part, mean = item_part(n, gained, lost), (gained - lost) / n
    assert pair["p_value"] == pytest.approx(score_p_value([part]), rel=1e-9)
    assert (pair["low"], pair["high"]) == pytest.approx(score_interval([part]), abs=1e-8)
    (back,) = ask(f"SELECT * FROM evaluation_pairs WHERE run_id = '{tuned}' AND other_run_id = '{base}'")
    assert (back["difference"], back["p_value"]) == pytest.approx((-mean, pair["p_value"]))
    assert ask(f"SELECT * FROM evaluation_pairs WHERE run_id = '{other}'") == []  # other items
    results = {(r["model"], r["setting"], r["task"]): r for r in ask("SELECT * FROM evaluation_results")}
    assert len(results) == 5
    assert results["b", "", "svamp"]["p_value"] is None
    unchanged = results["b+precise", "", "mmlu"]
    assert (unchanged["difference"], unchanged["p_value"], unchanged["q_value"]) == (0, 1, 1)
    assert results["b+precise", "", "svamp"]["q_value"] == pytest.approx(min(1, 2 * pair["p_value"]))
    assert results["b+precise", "", "svamp"]["base_run_id"] == base
    assert results["b+precise", "limit=4", "svamp"]["base_run_id"] is None
    table = ask("SELECT * FROM evaluation_table")
    assert [(row["method"], row["setting"]) for row in table] == [("base", ""), ("precise", ""), ("precise", "limit=4")]
    assert (table[0]["svamp"], table[0]["svamp_p"], table[0]["gsm8k"]) == (0.5, None, None)
    assert table[1]["svamp"] == pytest.approx(p)
    assert table[1]["svamp_low"] == pytest.approx(wilson.low)
    assert table[1]["svamp_p"] == pytest.approx(pair["p_value"])
    assert all(row["newest"] for row in results.values())
    summary = summarize_evaluations(store, [tuned])
    assert [row["method"] for row in summary.shown] == ["base", "precise"]  # the base comes along
    interval = f"[{100 * wilson.low:.1f}, {100 * wilson.high:.1f}]"
    assert summary.shown[1]["svamp"] == f"{100 * p:.1f} {interval} (+{100 * mean:.1f}, p {pair['p_value']:.2g})"
    assert summary.remarks == [
        "Items: svamp 40.", "svamp: 1 contexts were cut on the left to fit the model.",
        "svamp: no answer could be read from 1 responses.",
    ]  # fmt: skip


def item_part(n: int, gained: int, lost: int) -> Part:
    """Items of one unit each: an item moves by itself."""
    return Part(n, gained / n, lost / n, n / (1 + 0.3 / (gained + lost + 1)))


@pytest.mark.slow
def test_many_changed_items_and_a_single_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, "b", "gsm8k", "1" * 300 + "0" * 400)
    fill(store, "b+full", "gsm8k", "0" * 300 + "1" * 400, "full")
    fill(store, "b", "svamp", "0")
    fill(store, "b+one", "svamp", "1", "full")
    later = fill(store, "b+full", "gsm8k", "1", "full", items="other files")
    rows = store.rows("SELECT * FROM evaluation_results ORDER BY task, started_at")
    row, one = rows[1], rows[4]
    assert (row["method"], one["model"]) == ("full", "b+one")
    assert [(r["run_id"] == later, r["newest"]) for r in rows[:3]] == [(False, True), (False, False), (True, True)]
    assert (row["gained"], row["lost"]) == (400, 300)
    assert row["p_value"] == pytest.approx(score_p_value([item_part(700, 400, 300)]), rel=1e-8)
    assert row["p_value"] == pytest.approx(binomtest(400, 700).pvalue, rel=0.15), "close to the exact McNemar test"
    assert (one["difference"], one["p_value"] > 0.25, one["difference_low"] < -0.4) == (1, True, True)


@pytest.mark.ray
def test_the_command_evaluates_compares_and_resumes(data: Path, tmp_path: Path) -> None:
    folder, store = save_tiny(tmp_path / "llama", "llama"), tmp_path / "store"
    options = ["--tasks", "svamp", "--data-dir", data, "--store", store, "--fewshot", "0", "--replicas", "1", "--json"]

    def run(*more: object) -> Any:
        return CliRunner().invoke(main, [str(word) for word in ("evaluate", "--model", folder, *options, *more)])

    first = run()
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert (found["runs"][0]["rows"], found["runs"][0]["shards_done"]) == (8, 1)
    assert found["table"][0]["svamp"] == pytest.approx(found["results"][0]["accuracy"])
    again = json.loads(run().stdout)
    assert (again["runs"][0]["shards_reused"], again["runs"][0]["shards_done"]) == (1, 0)
    assert again["runs"][0]["run_id"] == found["runs"][0]["run_id"]
    with_ends(folder, [2, 30])
    corrected = json.loads(run().stdout)["runs"][0]
    assert (corrected["shards_reused"], corrected["shards_done"]) == (0, 1)
    order = [row["run_id"] for row in Store(store).rows("SELECT run_id FROM evaluations")]
    assert order == [found["runs"][0]["run_id"]] * 8 + [corrected["run_id"]] * 8  # the newest last
    with_ends(folder, 2)
    assert json.loads(run().stdout)["runs"][0]["run_id"] == found["runs"][0]["run_id"]
    (counted,) = Store(store).rows(
        "SELECT count(*) AS n, count(DISTINCT item_id) AS items, min(target) AS target FROM evaluations "
        f"WHERE run_id = '{corrected['run_id']}'"
    )
    assert counted == {"n": 8, "items": 8, "target": "10"}
    (kept,) = Store(store).rows("SELECT text, answer, operation FROM prompts WHERE prompt_id = 'chal-1'")
    assert kept == {
        "text": "Question: The total is 11. What is 11 minus 1 ?\nAnswer:",
        "answer": "10",
        "operation": "sub",
    }
    missing = run("--data-dir", tmp_path / "nowhere")
    assert missing.exit_code == 2
    assert "which is not there" in missing.stderr
    assert len(missing.stderr.strip().splitlines()) == 1
