"""What families.py and anatomy.py say about each family, held against what the model computes, in float64."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mathinterp.cluster.run import prepare_work
from mathinterp.errors import UserError
from mathinterp.experiments.registry import experiments
from mathinterp.models.anatomy import Anatomy, input_major_weight, model_shape
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.families import FAMILIES, family_of
from mathinterp.models.units import Head, Neuron
from mathinterp.prompts import prompt_set
from mathinterp.store import Store
from mathinterp.tuning.precise import Selection
from tests.tiny import (
    MISSING,
    MIXTURES,
    TINY_FAMILIES,
    VOCABULARY,
    WINDOW,
    WITH_NEURONS,
    save_tiny,
    tiny_config,
    tiny_model,
)
from tests.toy_scan import ToyScan

LAYER = 1
EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}
PLAIN_MLP = ("gpt2", "gptj", "gpt_neox", "falcon", "opt")
GROUPS = {"falcon": 1, "falcon-new": 2, "falcon-sequential": 4}
WIDE = ("qwen3", "gemma2", "gemma3", "qwen3_moe")  # 4 heads of 16 beside d_model 32
PARALLEL = ("gptj", "gpt_neox", "stablelm-parallel", "falcon", "falcon-new")


def without_gate(name: str) -> bool:
    return name.startswith(PLAIN_MLP)


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
        seen.output = (output[0] if isinstance(output, tuple) else output).clone()  # Falcon adds into it

    handle = module.register_forward_hook(keep, with_kwargs=True)
    run()
    handle.remove()
    return seen


def run_layer(anatomy: Anatomy, module: nn.Module) -> SimpleNamespace:
    return record(module, lambda: anatomy.model(token_ids()))


def test_sizes(name: str, anatomy: Anatomy) -> None:
    shape = anatomy.shape
    assert (shape.n_layers, shape.n_heads, shape.d_model, shape.n_neurons, shape.vocabulary) == (3, 4, 32, 40, 160)
    assert shape.n_groups == GROUPS.get(name, 4 if without_gate(name) else 2)
    assert shape.d_head == (16 if name in WIDE else 8)
    assert len(anatomy.layers) == shape.n_layers
    assert anatomy.output_weight(LAYER).shape == (shape.n_heads * shape.d_head, shape.d_model)
    if name in MIXTURES:
        assert (shape.n_experts, shape.experts_per_token) == (4, 2)
    else:
        assert anatomy.value_vectors(LAYER).shape == (shape.n_neurons, shape.d_model)
    assert anatomy.unembedding.weight.shape == (shape.vocabulary, shape.d_model)
    assert getattr(anatomy.decoder, anatomy.family.embedding) is anatomy.model.get_input_embeddings()
    assert shape.gated_mlp != without_gate(name)
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
        read = run_layer(anatomy, reader).input
        if isinstance(norm, nn.Identity):  # OLMo-2's reads the stream itself
            stream = run_layer(anatomy, anatomy.layers[LAYER])
            assert torch.equal(read, stream.input) == (reader is anatomy.attention(LAYER))
        else:
            assert torch.equal(run_layer(anatomy, norm).output, read)


def test_neurons_from_gate_up_and_value_vectors(anatomy: Anatomy) -> None:
    """Coefficient = act(gate) * up, or act(up) without a gate; MLP output = coefficients times value vectors."""
    if anatomy.shape.n_experts:
        with pytest.raises(UserError, match="single neurons are not supported"):
            anatomy.down_projection(LAYER)
        return
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
    if not dispatches(anatomy.attention(LAYER)):
        pytest.skip("its attention takes no function from transformers' interface; test_selftest.py shows the layout")
    captured = []

    def capture(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any):
        captured.append((query, key, value))
        kw.pop("softcap", None)  # Gemma-2's, unknown to SDPA; what comes after the capture does not matter here
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", sdpa_mask)
    anatomy.model.set_attn_implementation("capture")
    ids = token_ids()
    normed_BTD = record(anatomy.attention(LAYER), lambda: anatomy.model(ids, position_ids=torch.zeros_like(ids))).input
    assert len(captured) == anatomy.shape.n_layers
    projections = (anatomy.query(LAYER), anatomy.key(LAYER), anatomy.value(LAYER))
    counts = (anatomy.shape.n_heads, anatomy.shape.n_groups, anatomy.shape.n_groups)
    norms = [norm_of(anatomy.attention(LAYER), part) for part in "qkv"]
    for projection, count, norm, found in zip(projections, counts, norms, captured[LAYER], strict=True):
        flat = normed_BTD @ projection.weight.T
        flat = flat if projection.bias is None else flat + projection.bias
        if getattr(norm, "weight", flat[..., :0]).shape[-1] == flat.shape[-1]:
            split = norm(flat).unflatten(-1, (count, anatomy.shape.d_head)).transpose(1, 2)  # OLMo-2's, of all heads
        else:
            split = norm(flat.unflatten(-1, (count, anatomy.shape.d_head)).transpose(1, 2))
        if anatomy.shape.model_type == "opt" and found is captured[LAYER][0]:
            split = split * anatomy.attention(LAYER).scaling  # the others scale inside the attention function
        torch.testing.assert_close(split, found, **EXACT)


def norm_of(attention: nn.Module, part: str) -> nn.Module:
    """The norm of queries, keys or values, of each head by itself or of all together."""
    for name in (f"{part}_norm", f"{part}_layernorm"):
        if hasattr(attention, name):
            return getattr(attention, name)
    return nn.Identity()


def dispatches(attention: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(attention).forward).__code__.co_names


def test_parallel_means_that_the_mlp_does_not_see_attention(name: str, anatomy: Anatomy) -> None:
    before = run_layer(anatomy, anatomy.mlp(LAYER)).input
    anatomy.output_projection(LAYER).weight.zero_()
    unchanged = torch.equal(before, run_layer(anatomy, anatomy.mlp(LAYER)).input)
    assert anatomy.shape.parallel == unchanged == (name in PARALLEL)


def test_attention_windows(name: str, anatomy: Anatomy) -> None:
    """A query sees exactly the keys at a distance below the layer's window."""
    anatomy.model.set_attn_implementation("eager")
    weights = anatomy.model(token_ids(), output_attentions=True).attentions
    distance = torch.arange(9)[:, None] - torch.arange(9)[None, :]
    for layer, window in enumerate(anatomy.shape.attention_windows):
        allowed = (distance >= 0) & (distance < (window or 9))
        assert torch.equal(weights[layer][0, 0] > 0, allowed)
    expected = {
        "mistral-window": (WINDOW,) * 3,
        "gemma2": (WINDOW, None, WINDOW),
        "gemma3": (WINDOW, None, WINDOW),
    }.get(name, (None,) * 3)
    assert anatomy.shape.attention_windows == expected


def test_windows_of_qwen2_follow_its_switch() -> None:
    fields = dict(tiny_config("qwen2").to_dict(), sliding_window=WINDOW, layer_types=None, max_window_layers=1)
    for use, expected in ((False, (None, None, None)), (True, (None, WINDOW, WINDOW))):
        config = type(tiny_config("qwen2"))(**{**fields, "use_sliding_window": use})
        assert model_shape(config).attention_windows == expected


def test_unknown_family_names_the_entry_to_write() -> None:
    with pytest.raises(UserError) as error:
        family_of("starcoder2")
    assert str(error.value) == (
        "model family 'starcoder2' is not known (known: falcon, gemma2, gemma3_text, gpt2, gpt_neox, gptj, granite, "
        "llama, mistral, mixtral, olmo2, opt, phi3, qwen2, qwen3, qwen3_moe, smollm3, stablelm); "
        "add an entry FAMILIES['starcoder2'] in mathinterp/models/families.py and prove it with 'mathinterp selftest'"
    )


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("olmoe", "it is a mixture of experts"),
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
    assert str(error.value).endswith(
        "only decoders whose layers are one attention and one MLP are supported, and of mixtures of experts mixtral and"
        " qwen3_moe"
    )
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
    assert {tiny_config(name).model_type for name in TINY_FAMILIES} == set(FAMILIES) - set(MISSING)


def test_a_family_that_transformers_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of tiny.MISSING, which no other test knows, are by an older transformers."""
    folder = save_tiny(tmp_path / "model", "olmo2")
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "olmo2")
    with pytest.raises(UserError, match="olmo2") as refused:
        resolve(ModelSpec(str(folder)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("falcon", {"alibi": True}, "this Falcon has ALiBi"),
        ("falcon-new", {"parallel_attn": False}, "new_decoder_architecture=True, parallel_attn=False"),
        ("opt", {"do_layer_norm_before": False}, "this OPT has do_layer_norm_before=False: only"),
        ("opt", {"word_embed_proj_dim": 16}, "this OPT has word_embed_proj_dim=16: only"),
        ("opt", {"_remove_final_layer_norm": True}, "this OPT has _remove_final_layer_norm=True: only"),
        ("opt", {"layer_norm_elementwise_affine": False}, "this OPT has layer_norm_elementwise_affine=False: only"),
        ("gemma3", {"use_bidirectional_attention": True}, "reads later tokens"),
    ],
)
def test_variants_that_cannot_be_exact_are_refused(name: str, fields: dict[str, Any], reason: str) -> None:
    config = tiny_config(name)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(UserError, match=reason) as error:
        model_shape(config)
    assert "\n" not in str(error.value)


def test_an_opt_keeps_the_names_and_places_of_its_parameters() -> None:
    """Its layers get their MLPs as modules; weights, adapters and exports stay those of any OPT."""
    model, ids = tiny_model("opt"), token_ids()
    names, logits = list(model.state_dict()), model(ids).logits
    parameters = dict(model.named_parameters())
    Anatomy(model)
    assert list(model.state_dict()) == names
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=0)


def test_neurons_of_mixtures_are_refused_in_one_line() -> None:
    with pytest.raises(UserError) as error:
        model_shape(tiny_config("mixtral")).check_neurons()
    assert str(error.value) == (
        "model family 'mixtral' has mixtures of experts for MLPs: heads and whole MLPs can be studied and heads trained"
        ", but single neurons are not supported"
    )
    for name in MIXTURES:
        with pytest.raises(UserError, match="single neurons are not supported"):
            model_shape(tiny_config(name)).check_neurons()
    for name in WITH_NEURONS:
        model_shape(tiny_config(name)).check_neurons()


def test_experiments_about_neurons_refuse_mixtures_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfNeurons(ToyScan):
        reads_neurons: ClassVar[bool] = True

    spec = ModelSpec(str(save_tiny(tmp_path / "mixtral", "mixtral")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts, store = prompt_set("pairs", limit=2), Store(tmp_path / "store")
    assert prepare_work(ToyScan(), spec, prompts, False, store).model.shape.n_experts == 4
    with pytest.raises(UserError, match="single neurons are not supported"):
        prepare_work(OfNeurons(), spec, prompts, False, store)
    about = (
        "chain",
        "concepts",
        "concept_zeroing",
        "edit",
        "gender_neurons",
        "graph",
        "maskkeep",
        "neurons",
        "operands",
    )
    assert {name for name, experiment in experiments().items() if experiment.reads_neurons} == set(about)


def test_precise_tuning_of_neurons_refuses_mixtures() -> None:
    shape = model_shape(tiny_config("qwen3_moe"))
    Selection(heads=(Head(0, 1),)).check(shape)
    for selection in (Selection(neurons=(Neuron(0, 1),)), Selection(mlp_layers=(1,))):
        with pytest.raises(UserError, match="single neurons are not supported"):
            selection.check(shape)


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
