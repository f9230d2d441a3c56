"""The self-test holds on sound models, and fails where an identity is broken: a check that cannot fail is worthless."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mathinterp.engine import scores
from mathinterp.engine.choose import build_engine, packing_deviation
from mathinterp.engine.lens import lens
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.placement import Placement
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.engine.selftest import Check, selftest
from mathinterp.engine.tree import packing
from mathinterp.engine.tree.forest import Forest
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.families import FAMILIES
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from tests.tiny import MIXTURES, TINY_FAMILIES, VOCABULARY, randomized, tiny_config, tiny_model

LOGITS = "answer logits = the model's own logits"
HEAD_SUM = "heads' outputs sum to the attention output (relative)"
COLUMNS = "zeroed head = zeroed columns of o_proj"
ATTENTION = "attention by hand from q, k and v = o_proj's input (relative)"
STREAM = "residual stream by hand from norms and blocks (relative)"
LENS = "lens of the last layer = the model's logits"
GATES = "coefficients by hand from gate and up = down_proj's input (relative)"
NEURON_SUM = "neurons' outputs sum to the MLP output (relative)"
ZEROED = "zeroed coefficient = zeroed column of down_proj"
PACKED = "packed = one prompt at a time"
NO_OP = "no-op intervention = clean"
REPLAY = "replay from layer l = full forward with hooks"
OF_NEURONS = [GATES, NEURON_SUM, ZEROED]
ALL = [LOGITS, HEAD_SUM, COLUMNS, ATTENTION, STREAM, LENS, *OF_NEURONS, PACKED, NO_OP, REPLAY]

Breaks = Callable[[Anatomy, pytest.MonkeyPatch], None]


def make_prompts() -> list[TokenizedPrompt]:
    """Six prompts of two stems, longer than the tiny window, with two scored tokens each."""
    rng = np.random.default_rng(1)
    prompts = []
    for i in range(6):
        ids = (1, *(20 + i % 2 + k for k in range(5)), *(int(x) for x in rng.integers(4, VOCABULARY, size=4)))
        scored = tuple(ScoredToken(p, k, ids[k], "", "digit", None) for p, k in enumerate((8, 9)))
        prompts.append(TokenizedPrompt(Prompt(str(i), "text", "0"), ids, scored))
    return prompts


PROMPTS = make_prompts()


@pytest.fixture
def own_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention sums the softmax in float32, whose error would hide much in float64."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))


def broken(checks: list[Check]) -> set[str]:
    return {check.identity for check in checks if not check.holds}


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_sound_models_pass_with_room_to_spare(family: str, own_softmax: None) -> None:
    checks = list(selftest(Anatomy(tiny_model(family)), PROMPTS))
    assert [check.identity for check in checks] == [c for c in ALL if family not in MIXTURES or c not in OF_NEURONS]
    assert not broken(checks)
    in_float32 = {STREAM, LENS}  # where norms work in float32, a norm by hand in float64 is no closer
    assert all(check.difference < (1e-6 if check.identity in in_float32 else 1e-9) for check in checks)


@pytest.mark.slow
def test_a_family_without_tree_mask_is_checked_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))

    monkeypatch.setattr(anatomy, "family", replace(anatomy.family, tree_mask=False))
    assert [check.identity for check in selftest(anatomy, PROMPTS)] == ALL[:-3]


def mask_without_window(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Forest.ancestors
    monkeypatch.setattr(Forest, "ancestors", lambda self, pack, window=None: whole(self, pack, None))


def mask_that_shows_siblings(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(self: Forest, pack: int, window: int | None = None) -> np.ndarray:
        return np.tril(np.ones((self.pack_size, self.pack_size), bool))

    monkeypatch.setattr(Forest, "ancestors", causal)


def depths_one_off_below_the_root(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position ids 0, 2, 3, ...: what a second BOS or left padding would do."""
    build = packing.plant

    def shifted(*args: Any, **kwargs: Any) -> Forest:
        forest = build(*args, **kwargs)
        return replace(forest, depths_PN=forest.depths_PN + (forest.depths_PN > 0))

    monkeypatch.setattr(packing, "plant", shifted)


def slice_off_by_one(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = anatomy.head_slice
    monkeypatch.setattr(anatomy, "head_slice", lambda head: slice(right(head).start + 1, right(head).stop + 1))


def heads_too_narrow(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = anatomy.head_slice
    monkeypatch.setattr(anatomy, "head_slice", lambda head: slice(right(head).start, right(head).stop - 1))


def scores_with_another_norm(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final norm without its weight."""
    right, weight = scores.unembedded, anatomy.final_norm.weight
    monkeypatch.setattr(scores, "unembedded", lambda anatomy, normed: right(anatomy, normed / weight))


def lens_with_another_norm(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lens.norm_parts

    def without_weight(anatomy: Anatomy, norm: torch.nn.Module) -> lens.NormParts:
        parts = right(anatomy, norm)
        return replace(parts, gain_D=torch.ones_like(parts.gain_D))

    monkeypatch.setattr(lens, "norm_parts", without_weight)


def neurons_that_are_left_alone(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Placement.changed

    def none_of_neurons(self: Placement, clean: torch.Tensor, changes: list, rows: Any) -> torch.Tensor:
        return clean if changes[0].site == "neuron" else right(self, clean, changes, rows)

    monkeypatch.setattr(Placement, "changed", none_of_neurons)


def soft_cap_that_the_model_has_not(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(anatomy, "shape", replace(anatomy.shape, logit_softcap=5.0))


def without_the_soft_cap(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "shape", replace(anatomy.shape, logit_softcap=None))


def replay_from_the_layer_after(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedEngine._residual
    last = anatomy.shape.n_layers - 1
    monkeypatch.setattr(PackedEngine, "_residual", lambda self, layer, *rest: right(self, min(layer + 1, last), *rest))


def edits_that_do_nothing(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:

    right = PackedEngine._edited_attention
    monkeypatch.setattr(
        PackedEngine,
        "_edited_attention",
        lambda self, changes, *rest: right(self, [replace(change, units=()) for change in changes], *rest),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "breaks", "expected"),
    [
        ("mistral-window", mask_without_window, {PACKED, REPLAY}),
        ("llama", mask_that_shows_siblings, {PACKED, REPLAY}),
        ("llama", depths_one_off_below_the_root, {PACKED, REPLAY}),
        ("llama", slice_off_by_one, {HEAD_SUM}),
        ("gpt2", slice_off_by_one, {HEAD_SUM}),
        ("llama", heads_too_narrow, {HEAD_SUM}),
        ("llama", scores_with_another_norm, {LOGITS}),
        ("llama", lens_with_another_norm, {LENS}),
        ("llama", soft_cap_that_the_model_has_not, {LOGITS, LENS}),
        ("gemma2", without_the_soft_cap, {LOGITS, LENS}),
        ("llama", neurons_that_are_left_alone, {ZEROED}),
        ("llama", replay_from_the_layer_after, {NO_OP, REPLAY}),
        ("llama", edits_that_do_nothing, {REPLAY}),
    ],
)
def test_a_broken_identity_is_found(
    family: str, breaks: Breaks, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    anatomy = Anatomy(tiny_model(family))
    breaks(anatomy, monkeypatch)
    assert broken(list(selftest(anatomy, PROMPTS))) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "wrong", "expected"),
    [
        ("gpt_neox", {"fused_qkv_layout": "blocks"}, {ATTENTION}),
        ("falcon-new", {"fused_qkv_layout": "blocks"}, {ATTENTION}),
        ("phi3", {"fused_qkv_layout": "per_group"}, {ATTENTION}),
        ("gpt2", {"fused_qkv_layout": "per_group"}, {ATTENTION}),
        ("gptj", {"query": "k_proj", "key": "q_proj"}, {ATTENTION, NO_OP, REPLAY}),
        ("gptj", {"key": "v_proj", "value": "k_proj"}, {ATTENTION}),
        ("gptj", {"query": "v_proj", "value": "q_proj"}, {ATTENTION, NO_OP, REPLAY}),
        ("llama", {"gate": "up_proj", "up": "gate_proj"}, {GATES}),
        ("llama", {"gate": None}, {GATES}),
        ("gemma2", {"attention_post_norm": None}, {STREAM}),
        ("gemma2", {"mlp_norm": "post_attention_layernorm", "attention_post_norm": None}, {STREAM}),
        ("gemma2", {"norm_offset": 0.0}, {STREAM, LENS}),
        ("llama", {"norm_offset": 1.0}, {STREAM, LENS}),
        ("olmo2", {"mlp_post_norm": None}, {STREAM}),
        ("gpt_neox", {"parallel": False}, {STREAM}),
        ("gpt_neox-sequential", {"parallel": True}, {STREAM}),
        ("granite", {"residual_multiplier": None}, {STREAM}),
        ("granite", {"logits_divisor": None}, {LOGITS, LENS}),
    ],
)
def test_a_wrong_entry_is_found(
    family: str, wrong: dict[str, Any], expected: set[str], own_softmax: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    name = model.config.model_type
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], **wrong))
    assert broken(list(selftest(Anatomy(model), PROMPTS))) == expected


@pytest.mark.slow
def test_a_wrong_down_projection_is_found_where_its_width_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    config.intermediate_size = config.hidden_size
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], down_projection="up_proj"))
    model = randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float64), seed=0)
    assert broken(list(selftest(Anatomy(model), PROMPTS))) == {GATES, NEURON_SUM}


@pytest.mark.slow
def test_the_weights_are_as_before() -> None:
    anatomy = Anatomy(tiny_model("gpt2"))
    before = {name: value.clone() for name, value in anatomy.model.state_dict().items()}
    list(selftest(anatomy, PROMPTS))
    assert all(torch.equal(value, before[name]) for name, value in anatomy.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in anatomy.model.modules())


@pytest.mark.slow
def test_hooks_that_do_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain engine is the other side of two identities; it must not pass by leaving activations alone."""

    monkeypatch.setattr(Placement, "changed", lambda self, clean, changes, rows: clean.clone())
    assert COLUMNS in broken(list(selftest(Anatomy(tiny_model("llama")), PROMPTS)))


def test_nan_is_not_within_a_limit() -> None:
    assert not Check("identity", float("nan"), 1.0).holds


def test_nan_in_the_heads_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    whole = anatomy.output_weight
    monkeypatch.setattr(anatomy, "output_weight", lambda layer: whole(layer) * torch.nan)
    check = next(check for check in selftest(anatomy, PROMPTS) if check.identity == HEAD_SUM)
    assert not check.holds


def test_a_scan_refuses_a_mask_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("mistral-window"))
    assert packing_deviation(build_engine(anatomy, PROMPTS), anatomy, PROMPTS) < 1e-9
    mask_without_window(anatomy, monkeypatch)
    with pytest.raises(RuntimeError, match="does not take the tree mask as expected; use `engine` plain"):
        packing_deviation(build_engine(anatomy, PROMPTS), anatomy, PROMPTS)


def test_a_scan_refuses_scores_that_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    engine = build_engine(anatomy, PROMPTS)
    found = engine.baseline()
    found.logprob_EA[0, 0] = np.nan
    monkeypatch.setattr(engine, "baseline", lambda: found)
    with pytest.raises(RuntimeError, match="strays nan nats"):
        packing_deviation(engine, anatomy, PROMPTS)


def strays(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run says whose packed scores are NaN."""
    engine = build_engine(anatomy, PROMPTS, asked="packed")
    found = engine.baseline()
    found.logprob_EA[:] = np.nan
    monkeypatch.setattr(engine, "baseline", lambda: found)
    with pytest.raises(RuntimeError) as error:
        packing_deviation(engine, anatomy, PROMPTS)
    return str(error.value)


def test_the_plain_engine_is_advised_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    assert "use `engine` plain" in strays(anatomy, monkeypatch)
    whole = PlainEngine.baseline

    def padded_wrong(self: PlainEngine) -> Scores:
        found = whole(self)
        if self.batch_size > 1:
            found.logprob_EA[:] = np.nan
        return found

    monkeypatch.setattr(PlainEngine, "baseline", padded_wrong)
    told = strays(anatomy, monkeypatch)
    assert "padded batches" in told
    assert "use `engine` plain" not in told


@pytest.mark.parametrize(("dtype", "advice"), [(torch.float16, "; give `dtype` float32"), (torch.float64, "")])
def test_a_model_that_is_nan_itself_is_not_blamed_on_the_engine(
    dtype: torch.dtype, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    anatomy = Anatomy(tiny_model("llama", dtype=dtype))
    anatomy.final_norm.weight[0] = torch.nan
    told = strays(anatomy, monkeypatch)
    assert told.endswith(f"the model itself gives NaN or infinity in {str(dtype).removeprefix('torch.')}{advice}")
