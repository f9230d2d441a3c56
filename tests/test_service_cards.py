"""A process of the service with two cards: layers dealt out to both, also after the model was in host memory.

Without GPUs the cards are those of two_cards.py, where any operation that mixes two fails.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cluster import ray_cluster
from mathinterp.cluster.events import CardLost
from mathinterp.cluster.places import Placement
from mathinterp.cluster.replica import Replica, ReplicaJob
from mathinterp.cluster.run import Work, bound_work, check_model
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard
from mathinterp.experiments.heads import Heads
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve
from mathinterp.models.handle import Model, NamedSource
from mathinterp.models.recalled import look_up
from mathinterp.models.split import dealt, split_note
from mathinterp.service import serve
from mathinterp.service.codec import encode, encode_prompts
from mathinterp.service.host import CARD_SHARE, Answer, Host, HostSettings, UnknownSession
from mathinterp.service.place import OnService, spec_for
from mathinterp.service.settings import Settings
from mathinterp.service.shelf import CARD, MEMORY, Limits
from mathinterp.store import Store
from tests.service_case import served
from tests.two_card_case import CARD_BYTES, CPU, NO_ROOM, OTHER, PROMPTS, TINY, hooks, places, stand_in
from tests.two_cards import CARDS, movable


@pytest.fixture(params=["stand-ins", pytest.param("GPUs", marks=pytest.mark.gpu)])
def cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Two of them."""
    if request.param == "GPUs":
        if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        yield [torch.device("cuda", 0), torch.device("cuda", 1)]
        return
    stand_in(monkeypatch)
    with movable():
        yield list(CARDS)


# ---- one process ----


def work_of(folder: Path, spec: ModelSpec, scan: Heads | None = None) -> Work:
    return bound_work(scan or Heads(layers="0-1"), resolve(spec, "cuda"), PROMPTS, Store(folder))


def prepare(host: Host, name: str, work: Work) -> Answer:
    ask = {
        "experiment": encode(work.scan, work.scan.name),
        "spec": spec_for(Model(work.model.spec), work.model),
        "model_fingerprint": work.model.fingerprint,
        "prompts": encode_prompts(work.prompts),
        "prompts_fingerprint": work.prompts_fingerprint,
    }
    return called(host, "prepare", session=name, ask=ask)


def called(host: Host, kind: str, **work: Any) -> Answer:
    return host.run(Shard("call", 0, {"kind": kind, **work}))


def rows(host: Host, name: str, work: Work) -> list[Any]:
    shards = [{"table": each.table, "index": each.index, "work": each.work, "cost": each.cost} for each in work.shards]
    return [called(host, "rows", session=name, shard=shard).tables for shard in shards]


def ablated(host: Host, spec: ModelSpec) -> tuple[bytes, ...]:
    asked = {"spec": {"name": spec.name, "dtype": spec.dtype}, "model_fingerprint": resolve(spec, "cuda").fingerprint}
    arguments = encode({"heads": ["0.1", "2.3"]}, "`value`")
    return called(host, "ablate", **asked, prompts=encode(PROMPTS, "`prompts`"), arguments=arguments).tables


def without_service(work: Work, cards: int = 2) -> tuple[dict[str, Any], list[Any]]:
    """Notes and rows of a replica of a run, on so many cards."""
    from mathinterp.service.codec import table_bytes

    job = ReplicaJob(
        work.scan, NamedSource(work.model.spec), work.prompts, work.model.fingerprint, work.prompts_fingerprint, None,
        "", "cuda", threads=1, cards=cards,
    )  # fmt: skip
    made = Replica(job)
    notes = made.load()
    found = [(table_bytes(made.rows(shard).table),) for shard in work.shards]
    made.close()
    return notes, found


@pytest.mark.slow
def test_rows_of_two_cards_are_the_same_after_the_model_was_in_memory(
    cards: list[torch.device], tmp_path: Path
) -> None:
    """And those of a run without the service; layers lie again where they are dealt out to."""
    work = work_of(tmp_path, TINY)
    notes, expected = without_service(work)
    host = Host(HostSettings("cuda", NO_ROOM, cores=1, cards=2))
    assert host.load()["card_bytes"] == host.card_bytes() is not None
    answered = prepare(host, "question", work).facts["notes"]
    assert answered["split"] == notes["split"] == split_note(4, 2)
    model: Any = host._shelf._held[work.model.fingerprint, "float32"].loaded.model  # type: ignore[union-attr]
    there = [cards[card] for card in dealt(4, 2)] + [cards[0]]
    assert places(model) == there
    hooked, one = hooks(model), ablated(host, TINY)
    assert rows(host, "question", work) == expected

    for again in (False, True):
        held = host._shelf._held[work.model.fingerprint, "float32"]
        copy = held.copy
        assert (copy is not None) == again
        other = prepare(host, "other", work_of(tmp_path, OTHER))
        assert {row["fingerprint"]: row["level"] for row in other.there.held}[work.model.fingerprint] == MEMORY
        assert places(model) == [CPU] * 5
        assert all(before == 0 for before, *_ in hooks(model))
        if copy is not None:
            mine = {name: each.data_ptr() for name, each in model.named_parameters()}
            assert mine == {name: each.data_ptr() for name, each in copy.items()}, "it was copied once more"

        assert rows(host, "question", work) == expected
        assert ablated(host, TINY) == one
        assert held.loaded.model is model  # type: ignore[union-attr]
        assert places(model) == there
        assert hooks(model) == hooked
    assert [row["level"] for row in host._shelf.report()] == [CARD, MEMORY]


def test_limits_and_shares_are_of_all_cards_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for cards, limit in ((1, 0), (2, 0), (2, 77)):
        host = Host(HostSettings("cuda", Limits(limit, 1), cores=1, cards=cards))
        assert host.load() | {"node": "", "pid": 0} == {
            "node": "", "pid": 0, "device": "a stand-in", "card_bytes": CARD_BYTES
        }  # fmt: skip
        assert host._shelf._limits.card == (limit or int(CARD_SHARE * cards * CARD_BYTES))
        assert host._shelf.cards == cards
    half = Host(HostSettings("cuda", Limits(0, 1), cores=1, share=0.5))
    half.load()
    assert half._shelf._limits.card == int(CARD_SHARE * CARD_BYTES / 2), "another process has the other half"
    used = [0, 0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda card: used[card])
    assert not host._card_is_full()
    used[1] = int(0.7 * CARD_BYTES)
    assert host._card_is_full(), "the second card has no room left"
    monkeypatch.setattr(host._shelf, "ready_bytes", lambda: int(2 * 0.65 * CARD_BYTES))
    assert not host._card_is_full(), "the weights alone take so much, and nothing that is prepared"
    used[1] = int(0.9 * CARD_BYTES)
    assert host._card_is_full()


def test_a_process_with_fewer_gpus_than_it_was_given_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with pytest.raises(UserError, match="3 GPUs but torch sees 2 there"):
        Host(HostSettings("cuda", Limits(0, 1), cores=1, cards=3)).load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="1 GPU but torch sees none there"):
        Host(HostSettings("cuda", Limits(0, 1), cores=1)).load()


def test_a_process_whose_card_gives_nothing_but_errors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    host = Host(HostSettings("cuda", Limits(0, 1), cores=1, cards=2))
    host.load()
    with pytest.raises(UnknownSession):
        called(host, "rows", session="nobody's", shard={})

    def broken(card: int) -> None:
        if card == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(CardLost, match="gives nothing but errors: RuntimeError: CUDA error: an illegal memory access"):
        called(host, "rows", session="nobody's", shard={})


def test_shards_are_computed_with_the_threads_of_their_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever another question was given meanwhile: threads decide last bits."""
    monkeypatch.setattr("mathinterp.service.host.threads_for", lambda weights, cores: 2)
    before, work = torch.get_num_threads(), work_of(tmp_path, TINY)
    host = Host(HostSettings("cpu", Limits(0, 10**9), cores=2))
    try:
        prepare(host, "question", work)
        torch.set_num_threads(1)
        rows(host, "question", work)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_prepared_goes_with_its_model(tmp_path: Path) -> None:
    """Else it would keep the model's memory, and there would be two of them when it comes back."""
    work = work_of(tmp_path, TINY)
    host = Host(HostSettings("cpu", Limits(0, 1), cores=1))
    assert prepare(host, "question", work).there.prepared == ("question",)
    model = weakref.ref(host._shelf.take(work.model).model)
    asked = {"spec": {"name": OTHER.name, "dtype": "float32"}, "model_fingerprint": resolve(OTHER).fingerprint}
    arguments = encode({"heads": ["0.1"]}, "`value`")
    answer = called(host, "ablate", **asked, prompts=encode(PROMPTS, "`prompts`"), arguments=arguments)
    assert answer.there.prepared == ()
    gc.collect()
    assert model() is None
    assert rows(host, "question", work)
    assert host._there().prepared == ("question",)


LARGE = "random:llama-2-7b"


def test_a_process_refuses_before_it_loads_what_its_cards_cannot_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch)
    host = Host(HostSettings("cuda", Limits(0, 1), cores=1, cards=2))
    host.load()
    with pytest.raises(UserError, match=r"GB of them on one of 2 cards.*give `gpus_per_replica` \d+"):
        ablated(host, ModelSpec(LARGE, dtype="bfloat16"))
    for cards, said in ((5, "model 'random:llama-tiny' has only 4 layers to deal out"), (2, "needs its model whole")):
        monkeypatch.setattr(Heads, "runs_split", cards != 2)
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        host = Host(HostSettings("cuda", Limits(0, 1), cores=1, cards=cards))
        host.load()
        with pytest.raises(UserError, match=f"`gpus_per_replica` {cards}: .*{said}"):
            prepare(host, "question", work_of(tmp_path, TINY))
        assert host._sessions == {}
    assert host._shelf.report() == []


# ---- those who ask ----


class Told:
    """A service that says this about itself; nothing else may be asked of it."""

    url = "http://there"

    def __init__(self, **about: Any):
        self.about = {"device": "cuda", "replicas": 3, **about}

    def resolve(self, spec: ModelSpec, device: str) -> ResolvedModel:
        return look_up(spec, device)

    def json(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> dict[str, Any]:
        assert path == "/v1/experiments"
        return {}


def test_a_run_knows_the_cards_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for about, cards, card_bytes in (
        ({"gpus_per_replica": 2.0, "card_bytes": 10**9}, 2, 10**9),
        ({"gpus_per_replica": 0.25, "card_bytes": None}, 1, None),
        ({}, 1, None),
    ):
        place = OnService(Told(**about), Model(TINY), scan=Heads())  # type: ignore[arg-type]
        assert (place.cards(), place.card_bytes()) == (cards, card_bytes)
        assert place.placement(2, 1) == Placement(1, gpus=float(cards), cpus=1, threads=1)
        assert place.described().label == "random:llama-tiny"
    on_cpu = OnService(Told(device="cpu", gpus_per_replica=0.0), Model(TINY))  # type: ignore[arg-type]
    assert (on_cpu.cards(), on_cpu.placement(2, 1).gpus) == (1, 0.0)


@pytest.mark.parametrize(
    ("about", "name", "said"),
    [
        ({"gpus_per_replica": 5.0}, TINY.name, "`gpus_per_replica` 5: .* has only 4 layers to deal out"),
        (
            {"gpus_per_replica": 2.0, "card_bytes": 10**9},
            LARGE,
            "a card here has 1 GB.*no number of such cards holds it",
        ),
        ({"gpus_per_replica": 1.0, "card_bytes": 10**10}, LARGE, "13.5 GB of weights, and .*give `gpus_per_replica` 2"),
    ],
)
def test_what_the_cards_of_a_service_cannot_do_is_one_line_before_it_is_asked(
    about: dict[str, Any], name: str, said: str
) -> None:
    spec = ModelSpec(name, dtype="bfloat16")
    for scan in (Heads(), None):
        with pytest.raises(UserError, match=rf"{said}.*\(its cards .* at http://there, as 'mathinterp"):
            OnService(Told(**about), Model(spec), scan=scan).described()  # type: ignore[arg-type]


def test_an_experiment_that_needs_its_model_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heads, "runs_split", False)
    OnService(Told(gpus_per_replica=1.0), Model(TINY), scan=Heads()).described()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="`gpus_per_replica` 2: heads needs its model whole on one GPU; give 1 or less"):
        OnService(Told(gpus_per_replica=2.0), Model(TINY), scan=Heads()).described()  # type: ignore[arg-type]


def test_a_small_model_is_not_built_to_see_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes an import of seconds, which a question of a warm service must not wait for."""
    monkeypatch.setattr("mathinterp.cluster.can_run.check_fits", lambda *_: pytest.fail("it was built"))
    place = Told(gpus_per_replica=2.0, card_bytes=10**11)
    check_model(Heads(), resolve(ModelSpec(LARGE, dtype="bfloat16"), "cuda"), OnService(place, Model(TINY)))  # type: ignore[arg-type]


class OnStandIns(Host):
    """In a thread of its own, which does not know the cards otherwise."""

    def __init__(self) -> None:
        super().__init__(HostSettings("cuda", NO_ROOM, cores=1, cards=2))

    def load(self) -> dict[str, Any]:
        with movable():
            return super().load()

    def run(self, call: Shard) -> Answer:
        with movable():
            return super().run(call)


@pytest.mark.slow
def test_a_run_says_which_card_had_which_layer_and_status_says_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scan, model = Heads(layers="0-1"), mi.load(TINY.name, dtype="float32", device="cpu")
    here = mi.run(scan, model, PROMPTS, store=str(tmp_path / "here"), progress=False)
    stand_in(monkeypatch)
    with served(make=OnStandIns, device="cuda", gpus_per_replica=2.0) as (url, router, _):
        router.until_ready()
        service = mi.connect(url)
        assert repr(service) == f"<service at {url}, 1 replica on cuda, 2 GPUs each>"
        there = service.run(scan, model, PROMPTS, store=str(tmp_path / "there"), progress=False)
        assert service.status()["card_bytes"] == service.requests.about["card_bytes"] == CARD_BYTES
        shown = CliRunner().invoke(main, ["serve", "status", "--service", url])
    assert there.id == here.id
    assert Store(tmp_path / "there").record(there.id)["notes"]["split"] == split_note(4, 2)
    assert "1 replica on cuda (2 GPUs each), 0 requests" in shown.output
    assert "card_bytes" not in shown.output


# ---- starting ----


def test_processes_get_as_many_gpus_as_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(ray_cluster, "connection", lambda address: nullcontext())
    monkeypatch.setattr(ray_cluster, "local_gpus", lambda: 4)
    monkeypatch.setattr(ray_cluster, "cluster_total", lambda name: {"CPU": 8, "GPU": 4}[name])
    monkeypatch.setattr(ray_cluster, "largest_node", lambda name: {"CPU": 8, "GPU": 4}[name])
    monkeypatch.setattr(ray_cluster, "replicas_of_several", lambda gpus: 4 // gpus)
    monkeypatch.setattr(serve, "HostWorkers", lambda *given, **more: made.append((*given, more)))
    for asked, replicas, cards in ((2.0, 2, 2), (4.0, 1, 4), (None, 4, 1), (0.5, 8, 1)):
        _, placed = serve._processes(Settings(gpus_per_replica=asked, card_gb=3), _Stack())
        kind, host, reserved = made.pop()
        assert (kind, host.cards, host.device, host.limits.card) == (Host, cards, "cuda", 3 * 10**9)
        assert host.share == (0.5 if asked == 0.5 else 1)
        assert (placed.replicas, placed.gpus) == (replicas, reserved["num_gpus"]) == (replicas, asked or 1)


def test_a_limit_for_cards_where_there_are_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "connection", lambda address: nullcontext())
    monkeypatch.setattr(ray_cluster, "local_gpus", lambda: 0)
    there = {"CPU": 8, "GPU": 0, "memory": 2**36}
    monkeypatch.setattr(ray_cluster, "cluster_total", there.__getitem__)
    monkeypatch.setattr(ray_cluster, "largest_node", there.__getitem__)
    with pytest.raises(UserError, match="`card_gb` limits what lies on GPUs, and none is used here"):
        serve._processes(Settings(card_gb=3), _Stack())  # type: ignore[arg-type]


class _Stack:
    def enter_context(self, context: Any) -> Any:
        return context.__enter__()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("1.5", "--gpus-per-replica 1.5: layers lie on whole GPUs; give a whole number, or a fraction of one"),
        ("5", "--gpus-per-replica 5: no node has that many GPUs, the most is 4"),
    ],
)
def test_what_no_node_can_give_is_one_line(asked: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "connection", lambda *_: nullcontext())
    monkeypatch.setattr(ray_cluster, "local_gpus", lambda: 4)
    done = CliRunner().invoke(main, ["serve", "start", "--foreground", "--port", "0", "--gpus-per-replica", asked])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert said in done.stderr
