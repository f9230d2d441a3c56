"""Stores for the tests of whole runs: a finished run of many small files, on a disk and in an object store; kills."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from mathinterp.store import Store
from mathinterp.store.files import StoreFiles
from tests.small_store import FINGERPRINT, NO_NOISE, head_rows, open_run, prompt, scores

SHARDS = ["baseline/00000", *(f"head_scan/{i:05d}" for i in range(12))]
FEW = SHARDS[:5]  # for tests of every step
PARAMETERS = {"scoring": "token"}
STEPS = ("write", "remove", "remove_folder")  # what changes a store


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


def many_files(place: str | Path, shards: list[str] = SHARDS, **changes: Any) -> tuple[Store, str]:
    """A finished run with a file per head, each of its own version of the code."""
    store = Store(place)
    run = open_run(store, shards, **changes)
    store.write_prompts(changes.get("prompts_fingerprint", FINGERPRINT), [prompt(str(i)) for i in range(5)])
    for shard in shards:
        table, index = shard.split("/")
        if table == "baseline":
            rows = scores("baseline", [{"prompt_id": str(i), "logprob": -0.1 * i} for i in range(5)])
        else:
            rows = head_rows(count=2 + int(index) % 4, head=int(index))
        store.write_shard(run.run_id, table, int(index), rows, {"scan": "heads", "versions": {"source": index}})
    run.note({"noise_floor": NO_NOISE})
    assert run.finish() == []
    return Store(place), run.run_id


def places(tmp_path: Path) -> dict[str, str]:
    """A disk and an object store."""
    return {"disk": str(tmp_path / "a b's"), "memory": f"memory://{uuid4().hex}/results"}


def rows_of(store: Store, run: str, table: str = "head_scan") -> list[dict[str, Any]]:
    """Rows in the order in which a query without one gives them."""
    return store.rows(f"SELECT * FROM {table} WHERE run_id = '{run}'")


@contextmanager
def killed_at(step: int) -> Iterator[list[str]]:
    """The process ends just before its ``step``-th change of a store; what it changed is listed."""
    done: list[str] = []
    kept = {name: getattr(StoreFiles, name) for name in STEPS}

    def wrapped(name: str) -> Callable[..., Any]:
        def change(self: StoreFiles, file: str, *more: Any) -> Any:
            if len(done) == step:
                raise Killed
            done.append(f"{name} {file}")
            return kept[name](self, file, *more)

        return change

    for name in STEPS:
        setattr(StoreFiles, name, wrapped(name))
    try:
        yield done
    except Killed:
        pass
    finally:
        for name, original in kept.items():
            setattr(StoreFiles, name, original)


def steps_of(work: Callable[[], Any]) -> list[str]:
    """What of a store ``work`` changes, in order."""
    with killed_at(10**6) as done:
        work()
    return done
