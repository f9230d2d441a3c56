"""What families.py and anatomy.py say about each family, held against what the model computes, in float64."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, input_major_weight, model_shape
from mathinterp.models.families import FAMILIES, family_of
from tests.tiny import TINY_FAMILIES, VOCABULARY, WINDOW, tiny_config, tiny_model

LAYER = 1
EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}
GROUPED = {"llama", "llama3-rope-scaled", "mistral", "mistral-window", "qwen2", "qwen3", "gemma2", "phi3"}


@pytest.fixture(params=TINY_FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def anatomy(name: str) -> Anatomy:
    return Anatomy(tiny_model(name))


def token_ids(length: int = 9) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def record(module: nn.Module, run: Callable[[], Any]) -> SimpleNamespace:
    """First argument and output of ``module`` while ``run()`` is called."""
    seen = SimpleNamespace()

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.input = args[0] if args else kwargs["hidden_states"]
        seen.output = output[0] if isinstance(output, tuple) else output

    handle = module.register_forward_hook(keep, with_kwargs=True)
    run()
    handle.remove()
    return seen


def run_layer(anatomy: Anatomy, module: nn.Module) -> SimpleNamespace:
    return record(module, lambda: anatomy.model(token_ids()))


def test_sizes(name: str, anatomy: Anatomy) -> None:
    shape = anatomy.shape
    wide = name in ("qwen3", "gemma2")
    assert (shape.n_layers, shape.n_heads, shape.d_model, shape.n_neurons, shape.vocabulary) == (3, 4, 32, 40, 160)
    assert shape.n_groups == (2 if name in GROUPED else 4)
    assert shape.d_head == (16 if wide else 8)
    assert len(anatomy.layers) == shape.n_layers
    assert anatomy.output_weight(LAYER).shape == (shape.n_heads * shape.d_head, shape.d_model)
    assert anatomy.value_vectors(LAYER).shape == (shape.n_neurons, shape.d_model)
    assert anatomy.unembedding.weight.shape == (shape.vocabulary, shape.d_model)
    assert getattr(anatomy.decoder, anatomy.family.embedding) is anatomy.model.get_input_embeddings()
    assert shape.gated_mlp == (name in GROUPED)
    assert shape.logit_softcap == (5.0 if name == "gemma2" else None)
    assert shape.tied_unembedding == (anatomy.unembedding.weight is anatomy.model.get_input_embeddings().weight)


def test_logits_are_the_models_own(anatomy: Anatomy) -> None:
    last = {}
    handle = anatomy.layers[-1].register_forward_hook(
        lambda _, args, output: last.update(hidden=output[0] if isinstance(output, tuple) else output)
    )
    expected_BTV = anatomy.model(token_ids()).logits
    handle.remove()
    torch.testing.assert_close(anatomy.logits(last["hidden"]), expected_BTV, **EXACT)


def test_attention_writes_through_the_output_projection_only(anatomy: Anatomy) -> None:
    projection = anatomy.output_projection(LAYER)
    assert run_layer(anatomy, anatomy.attention(LAYER)).output.abs().min() > 0
    projection.weight.zero_()
    bias = projection.bias if projection.bias is not None else torch.zeros(anatomy.shape.d_model, dtype=torch.float64)
    output_BTD = run_layer(anatomy, anatomy.attention(LAYER)).output
    assert torch.equal(output_BTD, bias.expand_as(output_BTD))


def test_heads_sum_to_the_attention_output(anatomy: Anatomy) -> None:
    projection = anatomy.output_projection(LAYER)
    seen = run_layer(anatomy, projection)
    attention_BTD = run_layer(anatomy, anatomy.attention(LAYER)).output
    weight = anatomy.output_weight(LAYER)
    slices = [anatomy.head_slice(head) for head in range(anatomy.shape.n_heads)]
    heads = [seen.input[..., part] @ weight[part] for part in slices]
    total = sum(heads) if projection.bias is None else sum(heads) + projection.bias
    torch.testing.assert_close(total, attention_BTD, **EXACT)


def test_norms_feed_attention_and_mlp(anatomy: Anatomy) -> None:
    for norm, reader in (
        (anatomy.attention_norm(LAYER), anatomy.attention(LAYER)),
        (anatomy.mlp_norm(LAYER), anatomy.mlp(LAYER)),
    ):
        assert torch.equal(run_layer(anatomy, norm).output, run_layer(anatomy, reader).input)


def test_neurons_from_gate_up_and_value_vectors(anatomy: Anatomy) -> None:
    """Coefficient = act(gate) * up, or act(up) without a gate; MLP output = coefficients times value vectors."""
    mlp, down = anatomy.mlp(LAYER), anatomy.down_projection(LAYER)
    seen = run_layer(anatomy, mlp)
    activation = getattr(mlp, anatomy.family.activation)

    def project(projection: Any) -> torch.Tensor:
        values = seen.input @ projection.weight.T
        return values if projection.bias is None else values + projection.bias

    gate, up_BTK = anatomy.gate(LAYER), project(anatomy.up(LAYER))
    coefficients_BTK = activation(up_BTK) if gate is None else activation(project(gate)) * up_BTK
    torch.testing.assert_close(coefficients_BTK, run_layer(anatomy, down).input, **EXACT)
    output = coefficients_BTK @ anatomy.value_vectors(LAYER)
    torch.testing.assert_close(output if down.bias is None else output + down.bias, seen.output, **EXACT)


def test_query_key_and_value_features(anatomy: Anatomy) -> None:
    """Captured inside the attention function, with all positions 0 so that rotary embeddings turn nothing."""
    captured = []

    def capture(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any):
        captured.append((query, key, value))
        kw.pop("softcap", None)  # Gemma-2's, unknown to SDPA; what comes after the capture does not matter here
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", sdpa_mask)
    anatomy.model.set_attn_implementation("capture")
    ids = token_ids()
    normed_BTD = record(
        anatomy.attention_norm(LAYER), lambda: anatomy.model(ids, position_ids=torch.zeros_like(ids))
    ).output
    assert len(captured) == anatomy.shape.n_layers
    projections = (anatomy.query(LAYER), anatomy.key(LAYER), anatomy.value(LAYER))
    counts = (anatomy.shape.n_heads, anatomy.shape.n_groups, anatomy.shape.n_groups)
    norms = [getattr(anatomy.attention(LAYER), name, nn.Identity()) for name in ("q_norm", "k_norm", "v_norm")]
    for projection, count, norm, found in zip(projections, counts, norms, captured[LAYER], strict=True):
        flat = normed_BTD @ projection.weight.T
        flat = flat if projection.bias is None else flat + projection.bias
        split = norm(flat.unflatten(-1, (count, anatomy.shape.d_head))).transpose(1, 2)
        torch.testing.assert_close(split, found, **EXACT)


def test_parallel_means_that_the_mlp_does_not_see_attention(name: str, anatomy: Anatomy) -> None:
    before = run_layer(anatomy, anatomy.mlp(LAYER)).input
    anatomy.output_projection(LAYER).weight.zero_()
    unchanged = torch.equal(before, run_layer(anatomy, anatomy.mlp(LAYER)).input)
    assert anatomy.shape.parallel == unchanged == (name in ("gptj", "gpt_neox"))


def test_attention_windows(name: str, anatomy: Anatomy) -> None:
    """A query sees exactly the keys at a distance below the layer's window."""
    anatomy.model.set_attn_implementation("eager")
    weights = anatomy.model(token_ids(), output_attentions=True).attentions
    distance = torch.arange(9)[:, None] - torch.arange(9)[None, :]
    for layer, window in enumerate(anatomy.shape.attention_windows):
        allowed = (distance >= 0) & (distance < (window or 9))
        assert torch.equal(weights[layer][0, 0] > 0, allowed)
    expected = {"mistral-window": (WINDOW,) * 3, "gemma2": (WINDOW, None, WINDOW)}.get(name, (None,) * 3)
    assert anatomy.shape.attention_windows == expected


def test_windows_of_qwen2_follow_its_switch() -> None:
    fields = dict(tiny_config("qwen2").to_dict(), sliding_window=WINDOW, layer_types=None, max_window_layers=1)
    for use, expected in ((False, (None, None, None)), (True, (None, WINDOW, WINDOW))):
        config = type(tiny_config("qwen2"))(**{**fields, "use_sliding_window": use})
        assert model_shape(config).attention_windows == expected


def test_unknown_family_names_the_entry_to_write() -> None:
    with pytest.raises(UserError) as error:
        family_of("olmo2")
    assert str(error.value) == (
        "model family 'olmo2' is not known (known: gemma2, gpt2, gpt_neox, gptj, llama, mistral, phi3, qwen2, qwen3); "
        "add an entry FAMILIES['olmo2'] in mathinterp/models/families.py and prove it with 'mathinterp selftest'"
    )


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("mixtral", "it is a mixture of experts"),
        ("qwen2_moe", "it is a mixture of experts"),
        ("gpt_oss", "it is a mixture of experts"),
        ("mamba", "it is a recurrent model"),
        ("rwkv", "it is a recurrent model"),
        ("jamba", "it is a recurrent model"),
        ("lfm2", "it is a recurrent model"),
        ("t5", "it is an encoder-decoder"),
        ("bart", "it is an encoder-decoder"),
        ("trocr", "it is the decoder of an encoder-decoder"),
        ("xlnet", "it is a permutation model"),
        ("gemma3n_text", "it is a model of several residual streams (AltUp)"),
        ("bert", "it is an encoder, which"),
        ("llava", "it is a model of images or sound beside text"),
        ("gemma3", "it is a model of images or sound beside text"),
        ("minicpm3", "it is a model of latent attention"),
    ],
)
def test_where_no_entry_can_work_none_is_advised(model_type: str, kind: str) -> None:
    with pytest.raises(UserError) as error:
        family_of(model_type)
    assert kind in str(error.value)
    assert "only decoders whose layers are one attention and one MLP are supported" in str(error.value)
    assert "add an entry" not in str(error.value)


def test_a_config_tells_more_than_its_type() -> None:
    with pytest.raises(UserError, match="it is a mixture of experts"):
        family_of("someones_own", {"auto_map": {}, "n_routed_experts": 64})
    with pytest.raises(UserError, match="it is an encoder-decoder"):
        family_of("someones_own", {"auto_map": {}, "is_encoder_decoder": True})
    with pytest.raises(UserError, match=r"transformers \S+ does not know either"):
        family_of("someones_own", {"num_hidden_layers": 2})
    with pytest.raises(UserError, match=r"add an entry FAMILIES\['someones_own'\]"):
        family_of("someones_own", {"auto_map": {}, "num_experts": None, "layer_types": ["full_attention"]})


def test_layers_and_heads_out_of_range() -> None:
    shape = model_shape(tiny_config("llama"))
    shape.check_head(2, 3)
    for layer, head, message in (
        (3, 0, "layer 3 does not exist: the model has layers 0 to 2"),
        (-1, 0, "layer -1 does not exist: the model has layers 0 to 2"),
        (2, 4, "head 2.4 does not exist: each layer has heads 0 to 3"),
    ):
        with pytest.raises(UserError) as error:
            shape.check_head(layer, head)
        assert str(error.value) == message


def test_head_size_comes_from_the_config_that_names_it() -> None:
    config: PreTrainedConfig = tiny_config("qwen3")
    assert (model_shape(config).d_head, config.hidden_size // config.num_attention_heads) == (16, 8)


def test_every_family_has_a_tiny_model() -> None:
    assert {tiny_config(name).model_type for name in TINY_FAMILIES} == set(FAMILIES)


def test_an_entry_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], down_projection="up_proj"))
    with pytest.raises(UserError) as error:
        Anatomy(tiny_model("qwen3"))
    assert str(error.value) == (
        "family 'qwen3': down_projection maps 32 features to 40, but the config says 40 to 32: "
        "its entry in mathinterp/models/families.py is wrong"
    )


def test_input_major_weight_of_both_layouts() -> None:
    gpt2, llama = Anatomy(tiny_model("gpt2")), Anatomy(tiny_model("llama"))
    assert input_major_weight(gpt2.down_projection(0)).shape == input_major_weight(llama.down_projection(0)).shape
