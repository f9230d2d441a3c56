"""Quantised loading: what is refused before anything loads, a model's identity, and head scans without reading weights.

The stand-in for bitsandbytes' layers rounds weights and inputs as LLM.int8() does, so that o_proj is not linear.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from mathinterp.cli.main import main
from mathinterp.cluster.places import Here
from mathinterp.cluster.run import check_model
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.errors import UserError
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.paths import Paths
from mathinterp.models import quantised
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.handle import Model
from mathinterp.models.split import layers_of
from mathinterp.models.units import Head
from tests.exact import PROMPTS, assert_same
from tests.tiny import save_tiny, tiny_model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--load-in", "8bit"], "`load_in` 8bit needs a GPU, and this model would run on a CPU"),
        (["--load-in", "4bit", "--model", "random:llama-tiny"], "random weights cannot be quantised"),
        (["--load-in", "4bit", "--adapter", "anything"], "merge the adapter into its base first"),
        (["--load-in", "2bit"], "'2bit' is not one of '8bit', '4bit'"),
    ],
)
def test_mistakes_are_told_before_anything_loads(options: list[str], said: str, tmp_path: Path) -> None:
    if "--adapter" in options:
        from mathinterp.models.sources import known_adapters

        options = [*options[:-1], known_adapters()[0]]
    given = ["scan", "heads", "--gpus-per-replica", "0", "--store", str(tmp_path / "store"), *options]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2
    assert said.replace("`load_in`", "--load-in") in result.output
    assert not (tmp_path / "store").exists()


def gpu_resolved(folder: Path, load_in: str | None, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(quantised, "find_spec", lambda name: object())
    return resolve(ModelSpec(str(folder), load_in=load_in), "cuda")


def test_the_package_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path / "tiny", "llama")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package bitsandbytes.*mathinterp\[quantised\]"):
        resolve(ModelSpec(str(folder), load_in="8bit"), "cuda")


def test_how_a_model_is_quantised_is_part_of_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path / "tiny", "llama")
    found = [gpu_resolved(folder, way, monkeypatch) for way in (None, "8bit", "4bit")]
    assert len({model.fingerprint for model in found}) == 3
    assert found[0].fingerprint == resolve(ModelSpec(str(folder))).fingerprint
    assert [model.label for model in found] == ["tiny", "tiny (8bit)", "tiny (4bit)"]


def test_experiments_that_read_weights_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_resolved(save_tiny(tmp_path / "tiny", "llama"), "8bit", monkeypatch)
    place = Here(Model(model.spec))
    check_model(Heads(), model, place)
    for experiment in (Neurons(), Paths()):
        with pytest.raises(UserError, match=r"`load_in` 8bit: .* reads or trains weights as numbers"):
            check_model(experiment, model, place)


class Eighths(nn.Linear):
    """A linear map of int8 weights and inputs, each row with a scale of its own."""

    def __init__(self, original: nn.Linear):
        super().__init__(original.in_features, original.out_features, bias=False)
        self.scale_O = original.weight.abs().amax(dim=1) / 127
        numbers = (original.weight / self.scale_O[:, None]).round().to(torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        scale = given.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 127
        rounded = (given / scale).round() * scale
        return rounded @ (self.weight.to(given.dtype) * self.scale_O[:, None]).T


def quantised_anatomy() -> Anatomy:
    model = tiny_model("llama")
    for layer in layers_of(model):
        layer.self_attn.o_proj = Eighths(layer.self_attn.o_proj)
        layer.mlp.down_proj = Eighths(layer.mlp.down_proj)
    return Anatomy(model)


def test_heads_are_ablated_as_full_passes_do_it_though_o_proj_is_not_linear() -> None:
    anatomy = quantised_anatomy()
    assert anatomy.quantised
    packed, plain = PackedEngine(anatomy, PROMPTS, compiled=True), PlainEngine(anatomy, PROMPTS)
    baseline = plain.baseline()
    assert_same(packed.baseline(), baseline)
    for layer in range(3):
        heads = [zeroed(anatomy, [Head(layer, head)]) for head in range(4)]
        found = packed.run(heads)
        assert_same(found, plain.run(heads))
        assert (np.abs(found.logprob_EA - baseline.logprob_EA).max(axis=1) > 1e-6).all()


def test_quantised_numbers_are_never_taken_for_weights() -> None:
    anatomy = quantised_anatomy()
    for read in (anatomy.output_weight, anatomy.value_vectors):
        with pytest.raises(UserError, match="this reads weights as numbers, and the layers are quantised"):
            read(1)
    assert not Anatomy(tiny_model("llama")).quantised


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("load_in", quantised.LOAD_IN)
def test_a_model_is_loaded_quantised(load_in: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = Model(ModelSpec(str(save_tiny(tmp_path / "tiny", "llama")), dtype="bfloat16", load_in=load_in), "cuda")
    with model.lent() as loaded:
        assert loaded.anatomy.quantised
        with pytest.raises(UserError, match="quantised"):
            loaded.anatomy.output_weight(0)
        engine = PackedEngine(loaded.anatomy, PROMPTS)
        scores = engine.run([zeroed(loaded.anatomy, [Head(0, head)]) for head in range(4)])
        assert np.isfinite(scores.logprob_EA).all()
        assert np.isfinite(engine.noise_floor(engine.baseline())["max_logprob_deviation"])


# Nats by which an answer's log-probability may differ between packed prompts and each alone. NF4 is computed in float32
# here, and rounds alike. LLM.int8() rounds inputs by up to 1 part in 254 of the largest of their row, but not columns
# with a large input in any row of the batch: what else is in it decides who is rounded.
TOLERANCE = {"8bit": 0.5, "4bit": 0.01}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("load_in", quantised.LOAD_IN)
def test_packed_rows_of_a_quantised_model_are_those_of_each_prompt_alone(load_in: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = Model(ModelSpec(str(save_tiny(tmp_path / "tiny", "llama")), dtype="float32", load_in=load_in), "cuda")
    with model.lent() as loaded:
        assert_near(loaded.anatomy, TOLERANCE[load_in])


@pytest.mark.slow
def test_the_comparison_of_packed_and_lone_rows_sees_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on the stand-in: it passes, and fails where another head is ablated."""
    anatomy = quantised_anatomy()
    assert_near(anatomy, TOLERANCE["4bit"])
    real = PackedEngine.run
    monkeypatch.setattr(PackedEngine, "run", lambda engine, asked: real(engine, [*asked[1:], asked[0]]))
    with pytest.raises(AssertionError, match="apart"):
        assert_near(anatomy, TOLERANCE["8bit"])


def assert_near(anatomy: Anatomy, tolerance: float) -> None:
    """Every head's rows, packed and alone; each head changes some answer by more than the tolerance."""
    packed, alone = PackedEngine(anatomy, PROMPTS), PlainEngine(anatomy, PROMPTS, batch_size=1)
    heads = [zeroed(anatomy, [Head(layer, head)]) for layer in range(3) for head in range(4)]
    found, expected, baseline = packed.run(heads), alone.run(heads), alone.baseline()
    effects_E = np.abs(expected.logprob_EA - baseline.logprob_EA).max(axis=1)
    assert (effects_E > tolerance).all()
    for one, other in ((found, expected), (packed.baseline(), baseline)):
        apart = np.abs(one.logprob_EA - other.logprob_EA)
        assert apart.max() <= tolerance, f"{apart.max():.3g} nats apart"
        assert (one.predicted_EA == other.predicted_EA).mean() > 0.9
