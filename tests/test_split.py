"""One model on several cards: which card holds what, and engines that agree with one card, in float64."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from mathinterp.cluster import ray_cluster
from mathinterp.cluster.run import check_model
from mathinterp.engine import compiling
from mathinterp.engine.hooks import caught_output, edited_input
from mathinterp.engine.intervention import Tokens, Value, intervention, zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.errors import UserError
from mathinterp.experiments.heads import Heads
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.card_memory import ROOM, Weights, check_fits, weights_of
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.loading import without_dispatch
from mathinterp.models.random_shapes import random_config
from mathinterp.models.sources import find_source
from mathinterp.models.split import Courier, connect, dealt, device_map, layers_of, place_of_tensor, spread
from mathinterp.models.units import Head, Mlp
from mathinterp.tuning.settings import SweepSettings
from tests.exact import PROMPTS, assert_same
from tests.tiny import TINY_FAMILIES, tiny_config, tiny_model
from tests.two_cards import CARDS, on_cards

CPU = torch.device("cpu")


@dataclass
class Cards:
    """A place whose replicas have so many GPUs."""

    number: int

    def cards(self) -> int:
        return self.number

    def card_bytes(self) -> int:
        return 10**9


@pytest.mark.parametrize("cards", [1, 2, 3, 4])
def test_whatever_layer_a_replay_starts_from_the_rest_lies_evenly(cards: int) -> None:
    places = dealt(32, cards)
    for start in range(32):
        left = [places[start:].count(card) for card in range(cards)]
        assert max(left) - min(left) <= 1
    assert places[-1] == 0, "the last layer lies at home"
    busiest = max(sum(places[start:].count(card) for start in range(32)) for card in range(cards))
    assert busiest <= (sum(range(33)) + 32 * (cards - 1)) / cards


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_map_names_every_weight_once_and_keeps_tied_ones_together(family: str) -> None:
    config, cards = tiny_config(family), [torch.device("cuda", 0), torch.device("cuda", 1)]
    found, model, place = device_map(config, cards), tiny_model(family), place_of_tensor(config, ["home", "away"])
    for name, _ in model.named_parameters(remove_duplicate=False):
        owners = {found[path] for path in found if name.startswith(f"{path}.")}
        assert len(owners) == 1, name
        assert owners == {cards[0] if place(name) == "home" else cards[1]}
    layers = [f"{prefix}" for prefix in found if prefix.rpartition(".")[2].isdigit()]
    assert [found[path] for path in layers] == [cards[card] for card in dealt(3, 2)]


def test_weights_are_counted_from_the_config() -> None:
    for family in ("llama", "gemma2", "gpt2"):
        counted, model = weights_of(tiny_config(family), 8), tiny_model(family)
        assert sum(counted.layers) + counted.rest == sum(p.numel() * 8 for p in model.parameters())
        assert counted.on_cards(2) == [counted.rest + counted.layers[0] + counted.layers[2], counted.layers[1]]
    eighths, fourths = (sum(weights_of(tiny_config("llama"), 2, way).layers) for way in ("8bit", "4bit"))
    assert fourths < eighths < sum(weights_of(tiny_config("llama"), 2).layers)


def test_seventy_billion_parameters_want_two_cards_of_141_gigabytes() -> None:
    weights = weights_of(random_config("llama-2-70b"), 2)
    assert 137e9 < sum(weights.layers) + weights.rest < 139e9
    assert weights.cards_needed(141_000_000_000) == 2
    assert weights.cards_needed(80_000_000_000) == 2  # 69 GB each
    assert weights.cards_needed(48_000_000_000) == 4
    assert Weights((5, 5), 100).cards_needed(50) is None


def test_a_model_that_does_not_fit_is_refused_with_the_number_that_would_do() -> None:
    model = resolve(ModelSpec("random:llama-2-7b", dtype="bfloat16"))
    check_fits(model, 1, int(13.5e9 / ROOM))
    with pytest.raises(UserError, match=r"13\.5 GB of weights, and a card here has 10 GB.*give `gpus_per_replica` 2"):
        check_fits(model, 1, 10_000_000_000)
    with pytest.raises(UserError, match=r" 7 GB of them on one of 2 cards.*give `gpus_per_replica` 6"):
        check_fits(model, 2, 3_300_000_000)


def test_of_a_model_with_code_of_its_own_nothing_is_said_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asked on the terminal whether to run the code, and failed: on a GPU no such model could be run."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    shutil.copytree(find_source("bundled").location, folder)
    fields = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**fields, "auto_map": code}))
    (folder / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass OwnConfig(LlamaConfig):\n    pass\n\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    model = resolve(ModelSpec(str(folder), trust_remote_code=True))
    assert type(model.config).__name__ == "OwnConfig"
    check_fits(model, 1, 1)
    check_model(Heads(), model, Cards(1))
    with pytest.raises(UserError, match="`gpus_per_replica` 2: model 'own' runs its own code; give 1 or less"):
        check_model(Heads(), model, Cards(2))
    with pytest.raises(UserError, match="no number of such cards"):
        check_fits(resolve(ModelSpec(str(folder))), 1, 1)


@pytest.mark.slow
def test_engines_agree_with_one_card(anatomy: Anatomy, request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.params["anatomy"]
    one_plain = PlainEngine(anatomy, PROMPTS, batch_size=5)
    one_packed = PackedEngine(anatomy, PROMPTS, max_tokens=300, edits_per_batch=2)
    with on_cards(tiny_model(family)) as model:
        split = Anatomy(model)
        assert split.cards == CARDS
        plain = PlainEngine(split, PROMPTS, batch_size=5)
        packed = PackedEngine(split, PROMPTS, max_tokens=300, edits_per_batch=2)
        assert_same(plain.baseline(), one_plain.baseline())
        assert_same(packed.baseline(), one_packed.baseline())
        for layer in (0, 1, 2):
            units = [Head(layer, 1), Mlp(layer)]
            expected = one_plain.run([zeroed(anatomy, [unit]) for unit in units])
            changes = [zeroed(split, [unit]) for unit in units]
            assert_same(plain.run(changes), expected)
            assert_same(packed.run(changes), expected)  # by replay of whole layers
            assert_same(packed.run(changes[:1]), expected.of([0]))
            assert_same(packed.run(changes[1:]), expected.of([1]))


def test_the_cards_of_these_tests_refuse_what_two_gpus_would() -> None:
    with on_cards(tiny_model("llama")) as model:
        home, away = (torch.ones(2, 3, device=card) for card in CARDS)
        for mixed in (lambda: home + away, lambda: home @ away.T, lambda: torch.cat([home, away])):
            with pytest.raises(RuntimeError, match="one device is expected"):
                mixed()
        with pytest.raises(RuntimeError, match="one device is expected"):
            home[torch.zeros(1, dtype=torch.long, device=CARDS[1])]
        assert (home.to(CARDS[1]) + away).device == CARDS[1]
        assert home[torch.zeros(1, dtype=torch.long)].device == home.device
        layer = layers_of(model)[1]
        with pytest.raises(RuntimeError, match="one device is expected"):
            layer.mlp(home.new_zeros(1, 2, 32, dtype=torch.float64))  # nobody has connected it yet


def test_parts_of_a_layer_elsewhere_are_called_from_home_and_hooks_see_home() -> None:
    expected = Anatomy(tiny_model("llama"))
    rows = torch.randn(1, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with on_cards(tiny_model("llama")) as model:
        split = Anatomy(model)
        given = rows.to(CARDS[0])
        with caught_output(split.mlp(1)) as caught, edited_input(split.mlp(1), lambda value: 2 * value):
            found = split.mlp(1)(given)
        assert found.device == caught[0].device == CARDS[0]
        torch.testing.assert_close(found.cpu(), expected.mlp(1)(2 * rows))
        assert split.output_weight(1).device == split.gate(1).weight.device == CARDS[0]
        assert split.device == CARDS[0]


def test_one_card_is_left_as_it_is() -> None:
    model = tiny_model("llama")
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    spread(layers_of(model), [CPU])
    assert connect(model) == (CPU,)
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == hooks
    assert set(device_map(model.config, [CPU]).values()) == {CPU}


def test_what_accelerate_puts_around_modules_is_taken_away() -> None:
    """A shallow copy of a module would else compute with the original's parts: ablations would do nothing."""
    expected = PlainEngine(Anatomy(tiny_model("llama")), PROMPTS).run(
        [zeroed(Anatomy(tiny_model("llama")), [Head(1, 0)])]
    )
    model = tiny_model("llama")
    dispatch_model(model, dict.fromkeys(device_map(model.config, [CPU]), "cpu"), force_hooks=True)
    assert any("forward" in vars(module) for module in model.modules()), "accelerate left no trace: nothing is tested"
    without_dispatch(model)
    assert not any("forward" in vars(module) or hasattr(module, "_hf_hook") for module in model.modules())
    anatomy = Anatomy(model)
    assert_same(PackedEngine(anatomy, PROMPTS).run([zeroed(anatomy, [Head(1, 0)])]), expected)


@pytest.mark.slow
def test_layers_elsewhere_compile_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before and behind their calls is left out of what is compiled: arguments are there already."""
    counter = CompileCounter()
    monkeypatch.setattr(compiling, "COMPILER", counter)
    model = tiny_model("llama")
    courier = Courier(CPU, CPU)
    for module in layers_of(model)[1].modules():
        courier.serve(module)
    anatomy = Anatomy(model)
    torch._dynamo.reset()
    counters.clear()
    compiled = PackedEngine(anatomy, PROMPTS, tree_attention=False, compiled=True, pack_size=300, max_tokens=10_000)
    zero = Value.zero(anatomy, "head", 0)
    heads = [intervention([Head(0, head)], zero) for head in range(4)]
    found = compiled.run(heads)
    assert counter.frame_count > 0
    assert not counters["graph_break"]
    assert_same(found, PackedEngine(Anatomy(tiny_model("llama")), PROMPTS).run(heads))


def test_random_weights_do_not_depend_on_the_number_of_cards() -> None:
    one, two = (load(ModelSpec("random:llama-tiny"), "cpu", further).model for further in ((), ("cpu",)))
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_large_random_models_are_built_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from mathinterp.models import random_shapes

    monkeypatch.setattr(random_shapes, "BUILT_BY_LAYERS", {"llama-tiny"})
    one, two = (random_shapes.random_model("llama-tiny", 3, [CPU] * cards, torch.float32) for cards in (1, 2))
    assert len(layers_of(one)) == one.config.num_hidden_layers == 4
    assert [layer.self_attn.layer_idx for layer in layers_of(one)] == [0, 1, 2, 3]
    assert all(torch.equal(mine, other) for mine, other in zip(one.parameters(), two.parameters(), strict=True))
    weights = [layer.mlp.up_proj.weight for layer in layers_of(one)]
    assert not torch.equal(weights[0], weights[1])
    for weight in weights:
        assert float(weight.detach().std()) == pytest.approx(one.config.initializer_range, rel=0.1)
    assert {parameter.dtype for parameter in one.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (1.5, "`gpus_per_replica` 1.5: layers lie on whole GPUs; give a whole number"),
        (5, "`gpus_per_replica` 5: no node has that many GPUs, the most is 4"),
        (-1, "give 0 for CPU, a fraction of a GPU, or a whole number"),
    ],
)
def test_gpus_per_replica_is_a_fraction_or_a_whole_number(
    asked: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "local_gpus", lambda: 4)
    assert [ray_cluster.gpus_each(number) for number in (0, 0.25, 1, 2, 4)] == [0, 0.25, 1, 2, 4]
    with pytest.raises(UserError) as error:
        ray_cluster.gpus_each(asked)
    assert said in str(error.value)


def test_a_replica_of_several_gpus_lies_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": gpus}} for gpus in (3, 3, 1)]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster, "node_groups", lambda: [({"GPU": 8}, 0)])
    assert ray_cluster.replicas_of_several(2) == 2  # seven GPUs, but each pair on one node


def test_training_is_refused_on_several_gpus_and_the_identity_stays() -> None:
    with pytest.raises(UserError, match="`gpus_per_replica` 2: what is trained lies whole on one GPU"):
        SweepSettings(gpus_per_replica=2.0)
    assert "cards" not in Heads().parameters()


def test_a_value_for_single_tokens_is_laid_out_before_batches_run() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    engine = PackedEngine(anatomy, PROMPTS)
    ends = Tokens.ends(PROMPTS)
    value = Value.zero(anatomy, "head", 0, tokens=ends)
    placement = engine.placement()
    placement.lay_out([intervention([Head(0, 1)], value, ends)])
    laid_out = set(placement._laid_out)
    clean = torch.ones(engine.forest.n_packs, engine.forest.pack_size, 32, dtype=torch.float64)
    placement.apply(value, clean)
    assert set(placement._laid_out) == laid_out
    assert np.array_equal(np.unique(placement.apply(value, clean)), [0, 1])
