"""A model that is already in memory: used where it is, given back wholly, carried elsewhere with its weights."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import mathinterp as mi
from mathinterp.engine.plain import PlainEngine
from mathinterp.errors import UserError
from mathinterp.models.families import FAMILIES
from mathinterp.models.handle import Model
from mathinterp.models.reading import read_prompts
from mathinterp.models.wrapped import WrappedModel, content_fingerprint
from tests.tiny import TINY_FAMILIES, tiny_config, tiny_model, tiny_tokenizer

PROMPTS = mi.prompts("two_digit", limit=6)


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that must be the same afterwards."""
    return {
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {
            name: [list(hooks.values()) for attribute, hooks in vars(module).items() if attribute.endswith("_hooks")]
            for name, module in model.named_modules()
        },
        "modes": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: each.requires_grad for name, each in model.named_parameters()},
        "tensors": {
            name: (each.dtype, str(each.device), each.data_ptr(), each.detach().clone())
            for name, each in [*model.named_parameters(), *model.named_buffers()]
        },
        "objects": {name: (id(each), type(each)) for name, each in [*model.named_parameters(), *model.named_modules()]},
        "config": copy.deepcopy(vars(model.config)),
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, was in before["tensors"].items():
        now = after["tensors"][name]
        assert was[:3] == now[:3], name
        assert torch.equal(was[3], now[3]), name
    for part in before.keys() - {"tensors"}:
        assert before[part] == after[part], part


def disturbed(name: str) -> PreTrainedModel:
    """A model as somebody who trains it has it: nothing is as this package wants it."""
    model = tiny_model(name)
    model.set_attn_implementation("eager")
    model.train()
    model.requires_grad_(True)
    next(model.parameters()).requires_grad_(False)
    model.config.use_cache = True
    return model


def dynamic() -> PreTrainedModel:
    """One whose rotary modules remember what they have read."""
    config = tiny_config("llama")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    fields = {**config.to_dict(), "max_position_embeddings": 6, "rope_parameters": rope}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**fields)).train()


@pytest.mark.parametrize("name", [*TINY_FAMILIES, "dynamic"])
def test_a_model_is_given_back_wholly(name: str) -> None:
    model = dynamic() if name == "dynamic" else disturbed(name)
    wrapped = mi.wrap(model, tiny_tokenizer(), name="mine")
    before = state_of(model)
    named = {} if FAMILIES[model.config.model_type].experts else {"neurons": ["2.3"]}
    mi.ablate(wrapped, PROMPTS, heads=["1.1"], mlps=[0], **named)
    same(before, state_of(model))
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_while_lent(wrapped, model)
    same(before, state_of(model))


def test_also_after_hooks_and_attributes_that_a_block_forgets() -> None:
    model = disturbed("llama")
    wrapped = mi.wrap(model, tiny_tokenizer())
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        leave_a_mess(wrapped, model)
    same(before, state_of(model))


def fail_while_lent(wrapped: Model, model: PreTrainedModel) -> None:
    with wrapped.lent() as lent:
        assert lent.model is model
        assert not model.training
        assert not any(each.requires_grad for each in model.parameters())
        raise RuntimeError("on purpose")


def leave_a_mess(wrapped: Model, model: PreTrainedModel) -> None:
    with wrapped.lent():
        model.model.layers[0].register_forward_hook(lambda *_: None)
        model.model.layers[0].mlp.left_behind = 1
        model.model.layers[1].mlp = torch.nn.Identity()
        model.config.left_behind = 2
        del model.model.layers[2].mlp.act_fn
        raise KeyboardInterrupt


def test_it_answers_as_the_object_itself_does() -> None:
    model = disturbed("qwen2")
    wrapped = mi.wrap(model, tiny_tokenizer(), name="mine")
    rows = mi.ablate(wrapped, PROMPTS, heads=["0.0"]).rows
    with torch.no_grad():
        model.eval()
        for prompt, tokenized in zip(PROMPTS, read_prompts(PROMPTS, wrapped.described), strict=True):
            logprobs = model(torch.tensor([tokenized.input_ids])).logits[0].log_softmax(-1)
            expected = [float(logprobs[token.index - 1, token.token_id]) for token in tokenized.scored]
            found = rows[rows["prompt_id"] == prompt.prompt_id]["baseline_logprob"]
            np.testing.assert_allclose(found, expected, atol=1e-5)  # eager attention has its softmax in float32


@pytest.mark.parametrize("name", [*TINY_FAMILIES, "dynamic"])
def test_carried_elsewhere_it_is_the_same_model(name: str) -> None:
    model = dynamic() if name == "dynamic" else disturbed(name)
    wrapped = mi.wrap(model, tiny_tokenizer(), name="mine")
    before = state_of(model)
    source = pickle.loads(pickle.dumps(wrapped.carried(wrapped.described)))
    same(before, state_of(model))
    loaded = source.load(source.resolve("cpu"), "cpu")
    assert loaded.model is not model
    assert loaded.dtype == ("float32" if name == "dynamic" else "float64")
    tokenized = read_prompts(PROMPTS, wrapped.described)
    with wrapped.lent() as lent:
        expected = PlainEngine(lent.anatomy, tokenized).baseline()
    found = PlainEngine(loaded.anatomy, tokenized).baseline()
    assert np.array_equal(found.logprob_EA, expected.logprob_EA)
    assert np.array_equal(found.logit_EA, expected.logit_EA)


def test_a_model_that_its_class_does_not_rebuild_is_not_carried() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    wrapped = mi.wrap(model, tiny_tokenizer(), name="mine")
    assert mi.ablate(wrapped, PROMPTS, mlps=[0]).rows.shape[0] > 6
    source = wrapped.carried(wrapped.described)
    with pytest.raises(UserError, match="'mine' cannot be sent to other processes: LlamaForCausalLM built from its"):
        source.load(source.resolve("cpu"), "cpu")


def test_its_content_is_its_identity() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama")
    first = content_fingerprint(model, tokenizer)
    model.train()
    model.config.use_cache = True
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=8)
    assert content_fingerprint(model, tokenizer) == first == content_fingerprint(tiny_model("llama"), tiny_tokenizer())
    assert content_fingerprint(tiny_model("llama", dtype=torch.float32), tokenizer) != first
    assert content_fingerprint(tiny_model("llama", seed=1), tokenizer) != first
    assert content_fingerprint(model, tiny_tokenizer(["other"])) != first
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert content_fingerprint(model, tokenizer) != first
    model = tiny_model("llama")
    model.config.rms_norm_eps *= 2
    assert content_fingerprint(model, tokenizer) != first


def test_a_model_that_changed_is_told() -> None:
    model = tiny_model("llama")
    wrapped = mi.wrap(model, tiny_tokenizer(), name="mine")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1
    with pytest.raises(UserError, match="'mine' has changed since it was wrapped; wrap it again"):
        mi.ablate(wrapped, PROMPTS, heads=["0.0"])
    with pytest.raises(UserError, match="has changed since it was wrapped"):
        wrapped.carried(wrapped.described)


def refusals() -> list[tuple[Any, Any, str]]:
    hooked, mixed, broken, quantised, patched = (tiny_model("llama") for _ in range(5))
    patched.model.layers[2].mlp.forward = lambda hidden: hidden
    hooked.model.layers[1].register_forward_pre_hook(lambda *_: None)
    mixed.lm_head.to(torch.float32)
    broken.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    quantised.config.quantization_config = {"quant_method": "gptq"}
    slow = type("Slow", (type(tiny_tokenizer()),), {"is_fast": property(lambda self: False)})
    unfast = copy.deepcopy(tiny_tokenizer())
    unfast.__class__ = slow
    return [
        (hooked, tiny_tokenizer(), r"'mine' has forward hooks \(model\.layers\.1\); remove them first"),
        (mixed, tiny_tokenizer(), "weights of several dtypes or devices"),
        (broken, tiny_tokenizer(), r"NaN or infinite weights in 1 of .*up_proj"),
        (quantised, tiny_tokenizer(), "is quantised"),
        (tiny_model("llama"), unfast, "has no fast tokenizer"),
        (tiny_model("llama").model, tiny_tokenizer(), "no causal language model"),
        (patched, tiny_tokenizer(), r"'mine' has a forward of its own \(model\.layers\.2\.mlp\)"),
        (torch.nn.Linear(2, 2), tiny_tokenizer(), "no plain transformers model; merge adapters first"),
    ]


@pytest.mark.parametrize("case", range(8))
def test_what_cannot_be_wrapped(case: int) -> None:
    model, tokenizer, message = refusals()[case]
    with pytest.raises(UserError, match=message):
        mi.wrap(model, tokenizer, name="mine")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_a_gpu_stays_there(tmp_path: Any) -> None:
    model = disturbed("llama").to("cuda", torch.bfloat16)
    wrapped = mi.wrap(model, tiny_tokenizer(), name="mine")
    assert isinstance(wrapped, WrappedModel)
    before = state_of(model)
    run = mi.run(mi.experiments.Heads(), wrapped, PROMPTS, store=str(tmp_path), progress=False)
    assert run.complete
    assert run.ended.device == "cuda"
    mi.ablate(wrapped, PROMPTS, heads=["1.1"])
    same(before, state_of(model))
