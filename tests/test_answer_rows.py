"""The last layer at answer tokens alone: the same logits and gradients as everywhere, for less work."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy

from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.answer_rows import OnRows, last_layer_on_rows
from mathinterp.tuning.answers import AnswerLoss
from mathinterp.tuning.sft import compiled_layers
from tests.tiny import tiny_model

IDS_BT = torch.randint(4, 40, (3, 9), generator=torch.Generator().manual_seed(0))
BEFORE_N = torch.tensor([5, 7, 12, 16, 25])  # places in 3 x 9
GOLD_N = torch.tensor([4, 5, 6, 7, 8])


def loss_and_gradients(model: nn.Module, logits_NV: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = cross_entropy(logits_NV, GOLD_N)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_a_token_that_predicts_two_answers_gets_each_gradient_once() -> None:
    whole = Anatomy(tiny_model("llama"))
    model = trainable(whole.model)
    twice_N = torch.tensor([5, 7, 12, 7, 25])
    expected = loss_and_gradients(model, model(input_ids=IDS_BT).logits.flatten(0, 1)[twice_N])
    assert_same(loss_and_gradients(model, AnswerLoss(model, whole).logits(IDS_BT, twice_N)), expected)


def trainable(model: nn.Module) -> nn.Module:
    return model.requires_grad_(True).train()


def test_logits_and_all_gradients_are_those_of_the_whole_model(anatomy: Anatomy) -> None:
    model = trainable(anatomy.model)
    expected = loss_and_gradients(model, model(input_ids=IDS_BT).logits.flatten(0, 1)[BEFORE_N])
    assert_same(loss_and_gradients(model, AnswerLoss(model, anatomy).logits(IDS_BT, BEFORE_N)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_also_with_activations_recomputed_or_layers_compiled(how: str) -> None:
    whole = Anatomy(tiny_model("llama"))
    model = trainable(whole.model)
    expected = loss_and_gradients(model, AnswerLoss(model, whole).logits(IDS_BT, BEFORE_N))
    if how == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_same(loss_and_gradients(model, AnswerLoss(model, whole).logits(IDS_BT, BEFORE_N)), expected)
        return
    counter = CompileCounter()
    with compiled_layers(whole, backend=counter):
        assert_same(loss_and_gradients(model, AnswerLoss(model, whole).logits(IDS_BT, BEFORE_N)), expected)
    assert counter.frame_count > 0


def test_the_last_mlp_and_output_projection_see_answer_tokens_alone() -> None:
    whole = Anatomy(tiny_model("llama"))
    last = whole.shape.n_layers - 1
    seen: dict[str, list[int]] = {}
    parts = {
        "mlp": whole.mlp(last), "o_proj": whole.output_projection(last), "q_proj": whole.attention(last).q_proj,
        "k_proj": whole.attention(last).k_proj, "earlier": whole.mlp(last - 1),
    }  # fmt: skip
    for name, part in parts.items():
        part.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].numel() // args[0].shape[-1])
        )
    AnswerLoss(whole.model, whole).logits(IDS_BT, BEFORE_N)
    assert seen == {"mlp": [5], "o_proj": [5], "q_proj": [5], "k_proj": [27], "earlier": [27]}


def test_the_decoder_is_whole_again_after_an_error() -> None:
    whole = Anatomy(tiny_model("llama"))
    layers = whole.decoder.layers
    with pytest.raises(IndexError), last_layer_on_rows(whole, torch.tensor([10**6])):
        whole.decoder(input_ids=IDS_BT)
    assert whole.decoder.layers is layers
    assert not any(isinstance(module, OnRows) for module in whole.model.modules())
