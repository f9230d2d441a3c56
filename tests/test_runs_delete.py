"""``runs delete``: exactly one run goes, with prompts that nobody else has; killed, the same call ends it."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.store import Store, deleting
from mathinterp.store.files import StoreFailed
from tests.runs_case import FEW, SHARDS, killed_at, many_files, places, rows_of, steps_of
from tests.small_store import FINGERPRINT, open_run, write_head

OTHER = "0123456789abcdef"


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return places(tmp_path)[request.param]


def three_runs(place: str) -> list[str]:
    """Two runs of the same prompts, and one of others."""
    found = [many_files(place, FEW)[1], many_files(place, FEW, dtype="bfloat16")[1]]
    return [*found, many_files(place, FEW, prompts_fingerprint=OTHER)[1]]


def everything(place: str) -> set[str]:
    return {name for name in Store(place).files.find("", "") if name not in ("views.sql", "inspected.json")}


def of_run(names: set[str], run: str) -> set[str]:
    return {name for name in names if f"run_id={run}/" in name or run in name.split("/")[-1]}


@pytest.mark.slow
def test_exactly_that_run_goes(place: str) -> None:
    first, second, third = three_runs(place)
    before, rows = everything(place), rows_of(Store(place), second)
    planned = Store(place).runs.deletion(first)
    assert everything(place) == before
    assert planned.kept_prompts == f"run {second} has the same prompts"
    assert planned.prompts == []
    done = Store(place).runs.delete(first)
    assert done == planned
    assert everything(place) == before - of_run(before, first)
    assert done.bytes > 0
    assert rows_of(Store(place), second) == rows
    after = everything(place)
    gone = Store(place).runs.delete(third)
    assert {name.split("/")[0] for name in gone.prompts} == {"prompts", "answer_tokens"}
    assert everything(place) == {name for name in after if OTHER not in name and name not in of_run(after, third)}
    assert Store(place).runs.check().faults == []
    Store(place).runs.delete(second)
    assert everything(place) == set()
    with pytest.raises(UserError, match="there is no run"):
        Store(place).runs.delete(second)


@pytest.mark.slow
def test_killed_at_any_step_nothing_of_it_is_read_and_the_same_call_ends_it(tmp_path: Path) -> None:
    steps = steps_of(lambda: Store(tmp_path / "count").runs.delete(many_files(tmp_path / "count", SHARDS[:3])[1]))
    begun = next(i for i, each in enumerate(steps) if "baseline" in each and each.startswith("remove "))
    own = steps[begun - 1 :]
    assert own[0].startswith("write runs/"), own
    changes = [step for step, each in enumerate(own) if not each.startswith("remove_folder")]
    for step in changes:
        for kind in ("disk", "memory"):
            place = places(tmp_path / str(step))[kind]
            other = many_files(place, SHARDS[:3], dtype="bfloat16", prompts_fingerprint=OTHER)[1]
            _, run = many_files(place, SHARDS[:3])
            rows, whole = rows_of(Store(place), other), rows_of(Store(place), run)
            with killed_at(step):
                Store(place).runs.delete(run)
            seen = Store(place)
            assert rows_of(seen, other) == rows
            assert rows_of(seen, run) == (whole if step == 0 else [])
            faults = [fault for fault in Store(place).runs.check().faults if fault.run == run]
            left = f"runs/{run}.json" in everything(place)
            assert bool(faults) == (left and step > 0), (step, faults)
            assert {fault.mend for fault in faults} <= {"delete"}
            if left:
                Store(place).runs.delete(run)
            assert of_run(everything(place), run) == set()
            assert {name for name in everything(place) if "feedbeef" in name} == set()
            assert Store(place).runs.check().faults == []
            assert rows_of(Store(place), other) == rows


def test_links_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.parquet").write_bytes(b"mine")
    folder = Path(store.url, "head_scan", f"run_id={run}")
    os.symlink(outside, folder / "linked")
    os.symlink(outside / "mine.parquet", folder / "shard-00099.parquet")
    os.symlink(outside, Path(store.url, "mlp_scan"))
    (outside / f"run_id={run}").mkdir()
    (outside / f"run_id={run}" / "shard-00000.parquet").write_bytes(b"mine too")
    done = Store(store.url).runs.delete(run)
    assert {name.rpartition("/")[2] for name in done.left} == {"linked", "shard-00099.parquet"}
    assert (outside / "mine.parquet").read_bytes() == b"mine"
    assert (outside / f"run_id={run}" / "shard-00000.parquet").read_bytes() == b"mine too"
    assert sorted(each.name for each in folder.iterdir()) == ["linked", "shard-00099.parquet"]
    assert not Path(store.url, "runs", f"{run}.json").exists()


STRANGERS = ("head_scan/run_id={run}/junk.txt", "head_scan/run_id={run}/my/rows.parquet", "runs/notes.md",
             "prompts/prompts_fingerprint={prompts}/words.csv", "head_scan/plot.png")  # fmt: skip


def with_strangers(place: str) -> tuple[str, set[str]]:
    """A run, and files of nobody's in its folders and in those of the store."""
    store, run = many_files(place, FEW)
    names = {each.format(run=run, prompts=FINGERPRINT) for each in STRANGERS}
    for name in names:
        store.files.write(name, b"mine")
    return run, names


def test_files_of_others_are_named_by_check_and_stay(place: str) -> None:
    run, names = with_strangers(place)
    found = Store(place).runs.check().faults
    assert {fault.file for fault in found} == {*names, "views.sql"}  # which reads rows.parquet, too
    assert {(fault.kind, fault.mend) for fault in found} == {("foreign", "remove"), ("stale", "views")}
    of_it = {fault.file for fault in Store(place).runs.check([run]).faults}
    assert of_it == {name for name in names if run in name or FINGERPRINT in name}
    said = CliRunner().invoke(main, ["runs", "delete", run, "--yes", "--store", place]).stdout
    for name in names:
        told = f"{name} is nothing that mathinterp wrote; it is left alone." in said
        assert told == (name in of_it)
    assert everything(place) == names
    with pytest.raises(UserError, match="there is no run"):
        Store(place).runs.delete(run)


def test_a_store_with_files_but_no_run_is_a_store(tmp_path: Path) -> None:
    def command(*words: str):
        return CliRunner().invoke(main, [*words, "--store", str(tmp_path)])

    assert "there is no store" in command("runs", "list").stderr
    store, run = many_files(tmp_path, FEW)
    place = f"head_scan/run_id={'0' * 12}/shard-00000.parquet"
    store.files.write(place, store.files.read(f"head_scan/run_id={run}/shard-00000.parquet"))
    Store(tmp_path).runs.delete(run)
    assert command("runs", "list").stdout.startswith("no rows")
    checked = command("--log-format", "json", "runs", "check")
    assert checked.exit_code == 1
    assert f"foreign: {place}" in checked.stdout
    assert "there is no store" in command("sql", "SELECT 1").stderr


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "folder with a file", "folder with a folder"])
def test_what_is_in_the_place_of_the_record_is_no_end(tmp_path: Path, kind: str) -> None:
    """A folder there ended every call with "Is a directory"; a pipe or link was removed, and said to be left alone."""
    store, run = many_files(tmp_path / "store", FEW)
    record, mine = Path(store.url, "runs", f"{run}.json"), tmp_path / "mine"
    record.unlink()
    mine.write_text("mine")
    if kind == "pipe":
        os.mkfifo(record)
    elif kind == "link":
        record.symlink_to(mine)
    else:
        record.mkdir()
    if kind == "folder with a file":
        (record / "mine.txt").write_text("mine")
    elif kind == "folder with a folder":
        (record / "mine").mkdir()
    stays = kind.startswith("folder with")
    done = CliRunner().invoke(main, ["runs", "delete", run, "--yes", "--store", store.url])
    assert done.exit_code == 0, done.output
    assert (f"runs/{run}.json is a link or no regular file; it is left alone." in done.stdout) == stays
    assert os.path.lexists(record) == stays
    assert mine.read_text() == "mine"
    assert {name.split("/")[0] for name in everything(store.url)} - {"runs"} == {"prompts", "answer_tokens"}
    assert [fault.file for fault in Store(store.url).runs.check().faults] == (
        [f"runs/{run}.json/mine.txt"] if kind == "folder with a file" else []
    )


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"run_id": 7}'])
def test_a_run_whose_record_is_damaged_goes_and_its_prompts_stay(place: str, content: bytes) -> None:
    store, run = many_files(place, FEW)
    store.files.write(f"runs/{run}.json", content)
    done = Store(place).runs.delete(run)
    assert done.status == "no readable record"
    assert "does not say" in str(done.kept_prompts)
    assert {name.split("/")[0] for name in everything(place)} == {"prompts", "answer_tokens"}


def test_prompts_stay_where_another_record_cannot_be_read(place: str) -> None:
    store, run = many_files(place, FEW)
    store.files.write("runs/0123456789ab.json", b"{")
    done = Store(place).runs.delete(run)
    assert done.prompts == []
    assert "0123456789ab cannot be read" in str(done.kept_prompts)
    assert any(name.startswith("prompts/") for name in everything(place))


def test_files_of_others_beside_the_records_keep_no_prompts(place: str) -> None:
    store, run = many_files(place, FEW)
    for name in ("runs/notes.json", f"runs/{run} (copy).json"):
        store.files.write(name, store.files.read(f"runs/{run}.json"))
    found = Store(place).runs.delete(run)
    assert (len(found.prompts), found.kept_prompts) == (4, None)
    assert found.needed_by == []


@pytest.mark.parametrize(
    "name", ["../runs", "x", "", "*", "12345678901", "0123456789AB", "runs/0123456789ab", "-0123456789a"]
)
def test_names_that_are_no_ids_are_refused(tmp_path: Path, name: str) -> None:
    many_files(tmp_path, FEW)
    before = everything(str(tmp_path))
    with pytest.raises(UserError, match="no run id"):
        Store(tmp_path).runs.delete(name)
    assert everything(str(tmp_path)) == before


def test_a_run_that_a_driver_may_be_writing_is_refused(place: str, monkeypatch) -> None:
    store = Store(place)
    run = open_run(store, ["head_scan/00000", "head_scan/00001"]).run_id
    write_head(store, run)
    with pytest.raises(UserError, match=r"written to \d+ s ago: a driver may be at work on it.*`force`"):
        Store(place).runs.delete(run)
    monkeypatch.setattr("mathinterp.store.deleting.AT_WORK", 0.0)
    assert not Store(place).runs.deletion(run).may_be_at_work
    monkeypatch.undo()
    Store(place).runs.delete(run, force=True)
    assert of_run(everything(place), run) == set()


@pytest.mark.slow
def test_the_command_shows_asks_and_refuses_without_a_terminal(tmp_path: Path, monkeypatch) -> None:
    first, second, third = three_runs(str(tmp_path))
    before = everything(str(tmp_path))

    def command(*words: str, **more):
        return CliRunner().invoke(main, ["runs", "delete", *words, "--store", str(tmp_path)], **more)

    refused = command(first)
    assert refused.exit_code == 2
    assert "give --yes" in refused.stderr
    assert f"stay: run {second} has the same prompts" in refused.stdout
    assert everything(str(tmp_path)) == before
    monkeypatch.setattr("mathinterp.cli.runs.at_terminal", lambda: True)
    assert command(first, input="n\n").exit_code == 1
    assert everything(str(tmp_path)) == before
    assert command(first, input="y\n").exit_code == 0
    assert of_run(everything(str(tmp_path)), first) == set()
    done = command(second, third, "--yes", "--json")
    assert done.stderr == ""
    assert done.exit_code == 0, done.output
    assert [each["run_id"] for each in json.loads(done.stdout)] == [second, third]
    assert everything(str(tmp_path)) == set()


def test_two_at_once_leave_nothing_and_fail_on_nothing(place: str, monkeypatch) -> None:
    store, run = many_files(place, FEW)
    mark = deleting._mark

    def after_another(*arguments) -> None:
        monkeypatch.setattr(deleting, "_mark", mark)
        Store(place).runs.delete(run)
        mark(*arguments)

    monkeypatch.setattr(deleting, "_mark", after_another)
    store.runs.delete(run)
    assert everything(place) == set()


def test_a_run_that_another_builds_on_is_told(place: str) -> None:
    store, run = many_files(place, FEW)
    other = many_files(place, FEW, parameters={"reuse": run})[1]
    assert store.runs.deletion(run).needed_by == [other]
    assert store.runs.deletion(other).needed_by == []


def test_a_driver_does_not_bring_back_a_run_that_was_deleted(place: str) -> None:
    """It wrote the record anew: a failed run without files, and with it a store in an empty mount point."""
    store = Store(place)
    run = open_run(store, ["head_scan/00000", "head_scan/00001"])
    for index in range(2):
        write_head(store, run.run_id, index)
    with killed_at(2):
        Store(place).runs.delete(run.run_id, force=True)
    for work in (run.finish, lambda: run.note({"device": "cpu"}), lambda: run.grow([])):
        with pytest.raises(StoreFailed, match="is being deleted; `mathinterp runs delete"):
            work()
    Store(place).runs.delete(run.run_id, force=True)
    for work in (run.finish, lambda: run.note({"device": "cpu"}), lambda: run.grow([])):
        with pytest.raises(StoreFailed, match="it was deleted, or the store is away"):
            work()
    assert everything(place) == set()
