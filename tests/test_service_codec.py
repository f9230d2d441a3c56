"""What goes to a service as JSON comes out as it went in, for every experiment; nothing else is made of a request."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mathinterp.cluster.run import Work
from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.neurons import Neurons
from mathinterp.models.spec import ModelSpec
from mathinterp.models.units import Head
from mathinterp.prompts.given import prompts_of
from mathinterp.service.codec import (
    KIND,
    bytes_table,
    decode,
    decode_experiment,
    decode_prompts,
    encode,
    encode_prompts,
    table_bytes,
)
from tests.golden import runs
from tests.golden.models import word_model
from tests.golden.runs import FOLDER, INDEX, GoldenStore
from tests.test_golden import OF_A_SAVED_MODEL, assert_equal
from tests.toy_scan import ToyScan

INDEXED = json.loads(INDEX.read_text(encoding="utf-8"))
OURS = [name for name, each in registry.experiments().items() if each.__module__.startswith("mathinterp.experiments.")]


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[GoldenStore, set[str]]:
    """The golden runs, each of an experiment and prompts that went through JSON; and which experiments those were."""
    folder, went = tmp_path_factory.mktemp("sent"), set()
    prepare = runs.prepare_work

    def prepared(*given: Any, **more: Any) -> Work:
        work = prepare(*given, **more)
        if work.scan.name not in OURS:
            with pytest.raises(UserError, match=r"knows no experiment|cannot be sent"):
                decode_experiment(sent(encode(work.scan, "it")))
            return work
        went.add(work.scan.name)
        scan = decode_experiment(sent(encode(work.scan, "it")))
        prompts = decode_prompts(sent(encode_prompts(work.prompts)))
        assert prompts == work.prompts
        assert scan.parameters() == work.scan.parameters()
        return dataclasses.replace(work, scan=scan, prompts=prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "prepare_work", prepared)
        made = GoldenStore(folder / "store")
        runs.run_all(made, word_model(folder / "model"))
    return made, went


@pytest.mark.bundled
@pytest.mark.slow
def test_every_experiment_gives_the_same_rows_after_it_was_sent(golden: tuple[GoldenStore, set[str]]) -> None:
    made, went = golden
    assert went == set(OURS)
    stable = {name: run for name, run in made.ids.items() if name not in OF_A_SAVED_MODEL}
    assert stable == {name: run for name, run in INDEXED["run_ids"].items() if name not in OF_A_SAVED_MODEL}
    import pyarrow.parquet as pq

    for name in made.ids:
        for table, rows in made.rows(name).items():
            (file,) = Path(FOLDER).glob(f"{name.replace(' ', '_')}-{table}.parquet")
            assert_equal(f"{name} {table}", bytes_table(table_bytes(rows)), pq.ParquetFile(file).read())


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2**60, 0.1, float("inf"), "text", [1, [2.5]], (1, ("a", None)), {"a": (1,)}, {(0, 1): 2.5},
     Path("a/b"), Head(3, 4), (Head(0, 1), Head(2, 3)), ModelSpec("smollm2", "adapter")],
    ids=repr,
)  # fmt: skip
def test_values_come_back_with_their_types(value: Any) -> None:
    back = decode(sent(encode(value, "it")))
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, tuple):
        assert [type(each) for each in back] == [type(each) for each in value]


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int16", "bool"])
def test_arrays_come_back_bit_for_bit(dtype: str) -> None:
    array = np.random.default_rng(0).normal(size=(3, 4)).astype(dtype)
    back = decode(sent(encode(array, "it")))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@pytest.mark.parametrize(
    "given",
    [
        {KIND: "os:system", "fields": {}},
        {KIND: "subprocess:Popen", "fields": {"args": "true"}},
        {KIND: "mathinterp.store.store:Store", "fields": {"url": "/tmp"}},
        {KIND: "mathinterp.experiments.registry:importlib", "fields": {}},
        {KIND: "mathinterp.experiments.registry:find", "fields": {"name": "os:system"}},
        {KIND: "mathinterp.experiments.base:sys.modules", "fields": {}},
        {KIND: "pathlib:Path", "fields": {}},
        {KIND: "array", "dtype": "O", "shape": [1], "bytes": "AAAAAAAAAAA="},
        {KIND: "array", "dtype": "f8", "shape": [9], "bytes": "AAAA"},
        {KIND: "mathinterp.models.units:Head", "fields": {"layer": 1}},
        {KIND: "mathinterp.models.units:Head", "fields": {"layer": 1, "head": 2, "of_a_later_version": 3}},
        {KIND: "mathinterp.models.spec:ModelSpec", "fields": {"name": "x"}},
        {KIND: "mathinterp.models.units:Head", "fields": [1, 2]},
        {KIND: "mathinterp.models.spec:ModelSpec", "fields": {"name": "x", "trust_remote_code": True}},
        {"no kind": 1},
        {KIND: "tuple"},
        {KIND: 7},
    ],
    ids=lambda given: str(given)[:60],
)
def test_nothing_else_is_made_of_a_request(given: Any) -> None:
    with pytest.raises(UserError):
        decode(given)


@pytest.mark.parametrize("kind", ["tests.toy_scan:ToyScan", "mathinterp.tuning.prune:Prune", "heads", "", "a:b"])
def test_an_experiment_that_is_not_registered_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match=r"knows no experiment .* It has .*heads"):
        decode_experiment({KIND: kind, "fields": {}})


def test_an_experiment_from_outside_goes_where_it_is_registered() -> None:
    toy = ToyScan(3, always={1: "raise"})
    given = sent(encode(toy, "it"))
    with pytest.raises(UserError, match="knows no experiment"):
        decode_experiment(given)
    registry.add(ToyScan)
    assert decode_experiment(given) == toy


def test_what_must_stay_here_is_refused_before_it_is_sent() -> None:
    with pytest.raises(UserError, match=r"`value` holds a function, which cannot be sent to a service; run it here"):
        encode(lambda site, layer: None, "`value`")
    with pytest.raises(UserError, match="holds a object"):
        encode({"a": [object()]}, "it")


def test_lists_of_heads_and_bound_experiments_are_read_as_they_were() -> None:
    for scan in (Heads("mean", heads="0.6,0.1"), Heads(layers="0-3"), Neurons("head:0.6", keep="topk:10")):
        back = decode_experiment(sent(encode(scan, "it")))
        assert back == scan
        assert type(back) is type(scan)


def test_prompts_with_every_field_come_back() -> None:
    prompts = prompts_of([{"text": "a", "answer": "1", "token_types": {"subject": "a"}, "distractor": "2", "x": "y"}])
    assert decode(sent(encode(prompts, "it"))) == prompts
    with pytest.raises(UserError, match="cannot be read"):
        decode_prompts([[1, 2]])


def test_tables_come_back_with_their_schema() -> None:
    table = pa.table({"a": pa.array([1, None], pa.int8()), "b": pa.array([[1.5], []], pa.list_(pa.float32()))})
    assert bytes_table(table_bytes(table)).equals(table)
