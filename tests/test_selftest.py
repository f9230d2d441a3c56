"""The self-test holds on sound models, and fails where an identity is broken: a check that cannot fail is worthless."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mathinterp.engine.choose import build_engine, packing_deviation
from mathinterp.engine.edits import Edit, PlacedReplacement
from mathinterp.engine.hooks import caught_input
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.engine.selftest import Check, selftest
from mathinterp.engine.tree import packing
from mathinterp.engine.tree.forest import Forest
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from tests.tiny import VOCABULARY, tiny_model

LOGITS = "answer logits = the model's own logits"
HEAD_SUM = "heads' outputs sum to the attention output (relative)"
COLUMNS = "zeroed head = zeroed columns of o_proj"
PACKED = "packed = one prompt at a time"
NO_OP = "no-op intervention = clean"
REPLAY = "replay from layer l = full forward with hooks"
ALL = [LOGITS, HEAD_SUM, COLUMNS, PACKED, NO_OP, REPLAY]

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


def broken(checks: list[Check]) -> set[str]:
    return {check.identity for check in checks if not check.holds}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2", "gptj"])
def test_sound_models_pass_with_room_to_spare(family: str) -> None:
    checks = list(selftest(Anatomy(tiny_model(family)), PROMPTS))
    assert [check.identity for check in checks] == ALL
    assert not broken(checks)
    assert all(check.difference < 1e-9 for check in checks)


def test_a_family_without_tree_mask_is_checked_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))

    monkeypatch.setattr(anatomy, "family", replace(anatomy.family, tree_mask=False))
    assert [check.identity for check in selftest(anatomy, PROMPTS)] == ALL[:3]


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


def lens_with_another_norm(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final norm without its weight; forward passes of the plain engine still stop at the model's own norm."""
    own = anatomy.final_norm
    weight = own.weight

    def forward(self: PlainEngine, batch: np.ndarray) -> torch.Tensor:
        with caught_input(own) as caught:
            anatomy.decoder(input_ids=torch.tensor([self.prompts[i].fed for i in batch]), use_cache=False)
        return caught[0]

    monkeypatch.setattr(PlainEngine, "_forward", forward)
    monkeypatch.setattr(anatomy, "final_norm", lambda hidden: own(hidden) / weight)


def soft_cap_that_the_model_has_not(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(anatomy, "shape", replace(anatomy.shape, logit_softcap=5.0))


def replay_from_the_layer_after(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedEngine._residual
    last = anatomy.shape.n_layers - 1
    monkeypatch.setattr(PackedEngine, "_residual", lambda self, layer, *rest: right(self, min(layer + 1, last), *rest))


def edits_that_do_nothing(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:

    right = PackedEngine._edited_attention
    monkeypatch.setattr(
        PackedEngine,
        "_edited_attention",
        lambda self, layer, edits, *rest: right(self, layer, [Edit.heads_of(layer, ())] * len(edits), *rest),
    )


@pytest.mark.parametrize(
    ("family", "breaks", "expected"),
    [
        ("mistral-window", mask_without_window, {PACKED, REPLAY}),
        ("llama", mask_that_shows_siblings, {PACKED, REPLAY}),
        ("llama", depths_one_off_below_the_root, {PACKED, REPLAY}),
        ("llama", slice_off_by_one, {HEAD_SUM}),
        ("gpt2", slice_off_by_one, {HEAD_SUM}),
        ("llama", heads_too_narrow, {HEAD_SUM}),
        ("llama", lens_with_another_norm, {LOGITS}),
        ("llama", soft_cap_that_the_model_has_not, {LOGITS}),
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


def test_hooks_that_do_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain engine is the other side of two identities; it must not pass by leaving activations alone."""

    monkeypatch.setattr(
        PlacedReplacement, "apply", lambda self, clean, rows=slice(None), columns=slice(None): clean.clone()
    )
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
    with pytest.raises(RuntimeError, match="does not take the tree mask as expected; use --engine plain"):
        packing_deviation(build_engine(anatomy, PROMPTS), anatomy, PROMPTS)


def test_a_scan_refuses_scores_that_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    engine = build_engine(anatomy, PROMPTS)
    scores = engine.baseline()
    scores.logprob_EA[0, 0] = np.nan
    monkeypatch.setattr(engine, "baseline", lambda: scores)
    with pytest.raises(RuntimeError, match="strays nan nats"):
        packing_deviation(engine, anatomy, PROMPTS)


def strays(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run says whose packed scores are NaN."""
    engine = build_engine(anatomy, PROMPTS, asked="packed")
    scores = engine.baseline()
    scores.logprob_EA[:] = np.nan
    monkeypatch.setattr(engine, "baseline", lambda: scores)
    with pytest.raises(RuntimeError) as error:
        packing_deviation(engine, anatomy, PROMPTS)
    return str(error.value)


def test_the_plain_engine_is_advised_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    assert "use --engine plain" in strays(anatomy, monkeypatch)
    whole = PlainEngine.baseline

    def padded_wrong(self: PlainEngine) -> Scores:
        scores = whole(self)
        if self.batch_size > 1:
            scores.logprob_EA[:] = np.nan
        return scores

    monkeypatch.setattr(PlainEngine, "baseline", padded_wrong)
    told = strays(anatomy, monkeypatch)
    assert "padded batches" in told
    assert "use --engine plain" not in told


@pytest.mark.parametrize(("dtype", "advice"), [(torch.float16, "; give --dtype float32"), (torch.float64, "")])
def test_a_model_that_is_nan_itself_is_not_blamed_on_the_engine(
    dtype: torch.dtype, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    anatomy = Anatomy(tiny_model("llama", dtype=dtype))
    anatomy.final_norm.weight[0] = torch.nan
    told = strays(anatomy, monkeypatch)
    assert told.endswith(f"the model itself gives NaN or infinity in {str(dtype).removeprefix('torch.')}{advice}")
