"""Precise fine-tuning: exactly the chosen heads train, and the adapter is the masked full update."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, input_major_weight, model_shape
from mathinterp.models.random_shapes import random_config
from mathinterp.tuning.precise import (
    ADAPTER,
    Selection,
    attach,
    heads_that_move_along,
    parts_of,
    save_adapter,
)
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_config, tiny_model
from tests.trained_part import mask_of

HEADS = ((0, 3), (1, 0), (1, 2))
STEPS = 6


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(4, 160, (3, 9), generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    ids = tokens(step)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def train(model: torch.nn.Module, parameters: list[torch.nn.Parameter], weight_decay: float = 0.0) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=weight_decay)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def train_masked(model, parts) -> None:
    """The slow, obvious twin: full weight matrices under AdamW, gradients outside the parts set to 0."""
    modules = dict(model.named_modules())
    weights = []
    for part in parts:
        weight = modules[part.module].weight
        mask = mask_of(model, part)
        weight.requires_grad_(True).register_hook(lambda gradient, mask=mask: gradient * mask)
        weights.append(weight)
    train(model, weights)


def train_precisely(model, selection, weight_decay: float = 0.0) -> PeftModel:
    adapted = attach(model, parts_of(Anatomy(model), selection))
    train(adapted, [p for p in adapted.parameters() if p.requires_grad], weight_decay)
    return adapted


@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_precise_is_masked_full_training(family, with_groups):
    selection = Selection(HEADS, with_groups=with_groups)
    twin, precise = tiny_model(family), tiny_model(family)
    parts = parts_of(Anatomy(twin), selection)
    before = {name: p.clone() for name, p in twin.named_parameters()}
    train_masked(twin, parts)
    merged = train_precisely(precise, selection).merge_and_unload()
    moved = 0.0
    for name, expected in twin.named_parameters():
        found = merged.get_parameter(name)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12), (family, name, (found - expected).abs().max())
        untouched = expected == before[name]
        assert torch.equal(found[untouched], before[name][untouched]), name
        moved += (expected - before[name]).abs().sum().item()
    assert moved > 1  # it did train
    assert (loss_of(merged, 0) - loss_of(twin, 0)).abs() < 1e-11


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gemma2"])
def test_neurons_train_the_same_way(family):
    selection = Selection(heads=((1, 1),), neurons=((0, 7), (2, 39)), mlp_layers=(1,))
    twin, precise = tiny_model(family), tiny_model(family)
    parts = parts_of(Anatomy(twin), selection)
    assert {len(part.features) for part in parts} >= {1, 40}
    train_masked(twin, parts)
    merged = train_precisely(precise, selection).merge_and_unload()
    for name, expected in twin.named_parameters():
        assert torch.allclose(merged.get_parameter(name), expected, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])  # gemma2 and gpt2 are tied
def test_untouched_weights_stay_bitwise_under_weight_decay(family):
    model = tiny_model(family, dtype=torch.float32)
    parts = parts_of(Anatomy(model), Selection(HEADS))
    inside = {f"{part.module}.weight": mask_of(model, part) for part in parts}
    before = copy.deepcopy(model.state_dict())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    adapted = train_precisely(model, Selection(HEADS), weight_decay=0.1)
    for part in parts:
        module = model.get_submodule(part.module)
        assert torch.equal(module.base_layer.weight, before[f"{part.module}.weight"])
        frozen = module.lora_B if part.side == "rows" else module.lora_A
        assert sorted(frozen[ADAPTER].weight.unique().tolist()) == [0.0, 1.0]
    merged = adapted.merge_and_unload()
    after = merged.state_dict()
    assert after.keys() == before.keys()
    for name, weight in before.items():
        changed = weight.view(torch.int32) != after[name].view(torch.int32)
        if name in inside:
            assert changed[inside[name]].any()
            assert not changed[~inside[name]].any(), name
        else:
            assert not changed.any(), name
    assert tied == (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox"])
def test_the_parts_are_the_heads(family):
    """Cutting a head by its parts gives what zeroing its q, k, v rows and o columns by hand gives."""
    model = tiny_model(family)
    anatomy = Anatomy(model)
    d = anatomy.shape.d_head
    for part in parts_of(anatomy, Selection(((1, 2),), with_groups=True)):
        weight = input_major_weight(model.get_submodule(part.module))
        if part.side == "columns":
            assert torch.equal(weight[list(part.features)], anatomy.output_weight(1)[2 * d : 3 * d])
            continue
        rows = weight.T[list(part.features)]
        group = 2 * anatomy.shape.n_groups // anatomy.shape.n_heads
        own = {0: anatomy.query(1), 1: anatomy.key(1), 2: anatomy.value(1)}
        expected = [
            projection.weight[at * d : (at + 1) * d]
            for which, projection in own.items()
            for at in [2 if which == 0 else group]
            if projection.module is model.get_submodule(part.module)
        ]
        assert torch.equal(rows, torch.cat(expected))


@pytest.mark.slow
def test_parameter_counts_of_the_published_models():
    heads = tuple((12 + i % 6, i) for i in range(32))
    for shape, count in (("llama-2-7b", 67_108_864), ("llama-2-13b", 83_886_080), ("mistral-7b", 33_554_432)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(random_config(shape))
        parts = parts_of(Anatomy(model), Selection(heads))
        adapted = attach(model, parts)
        assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == count


def test_layers_below_the_lowest_trained_one_build_no_graph():
    model = tiny_model("llama")
    anatomy = Anatomy(model)
    adapted = attach(model, parts_of(anatomy, Selection(((2, 1),))))
    needs_graph = []
    handles = [
        layer.register_forward_hook(lambda _, __, out: needs_graph.append(out.requires_grad))
        for layer in anatomy.layers
    ]
    adapted(input_ids=tokens(0), use_cache=False)
    for handle in handles:
        handle.remove()
    assert needs_graph == [False, False, True]


def test_grouped_heads_move_along():
    shape = model_shape(tiny_config("llama"))  # 4 heads, 2 groups
    assert heads_that_move_along(shape, [(0, 3), (1, 0), (1, 1)]) == [(0, 2)]
    model = tiny_model("llama")
    assert [part.module.split(".")[-1] for part in parts_of(Anatomy(model), Selection(((0, 3),)))] == [
        "q_proj",
        "o_proj",
    ]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(((3, 0),)), "layer 3 does not exist"),
        (Selection(((0, 4),)), "head 0.4 does not exist"),
        (Selection(neurons=((0, 40),)), "neuron 0.40 does not exist"),
        (Selection(((0, 1), (0, 1))), "given twice"),
        (Selection(), "no head is chosen"),
    ],
)
def test_impossible_selections(selection, message):
    with pytest.raises(UserError, match=message):
        parts_of(Anatomy(tiny_model("llama")), selection)


PLAIN = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[1]))
for folder in sys.argv[2:]:
    base = AutoModelForCausalLM.from_pretrained(folder + "/base", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, folder + "/adapter").double().eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        merged = model.merge_and_unload()(input_ids=ids).logits
    torch.save((adapted, merged), folder + "/logits.pt")
assert not any(name.startswith("mathinterp") for name in sys.modules)
"""


@pytest.mark.slow
def test_the_adapter_loads_with_plain_peft(tmp_path):
    """In a process of its own, which loads those of both layouts of weights."""
    ids, expected, unadapted = tokens(9), {}, {}
    for family in ("llama", "gpt2"):
        save_tiny(tmp_path / family / "base", family, dtype=torch.float64)
        adapted = train_precisely(tiny_model(family), Selection(HEADS))
        adapted.eval()
        save_adapter(adapted, tmp_path / family / "adapter", "some/base")
        with torch.no_grad():
            expected[family] = adapted(input_ids=ids).logits
            unadapted[family] = tiny_model(family)(input_ids=ids).logits
        config = json.loads((tmp_path / family / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "some/base"
    words = [json.dumps(ids.tolist()), *(str(tmp_path / family) for family in expected)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN, *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for family, logits in expected.items():
        loaded, merged = torch.load(tmp_path / family / "logits.pt")
        assert (unadapted[family] - logits).abs().max() > 1e-2
        assert torch.allclose(loaded, logits, rtol=0, atol=1e-11)
        assert torch.allclose(merged, logits, rtol=0, atol=1e-11)
