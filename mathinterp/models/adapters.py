"""PEFT LoRA adapters: checked against their base before any weight is loaded, then merged into it.

Knows PEFT's files and tensor names; knows nothing about where base models come from. After merging, the model
consists of its own plain modules again, so anatomy and interventions see no difference. Which modules an adapter
changes is asked of PEFT itself, on a model without weights; what its options mean is in adapter_options.py; and at
every load the merged model must answer as PEFT's own, unmerged, does.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig

from mathinterp.errors import UserError, first_line_of
from mathinterp.models.adapter_options import changes_base, read_options
from mathinterp.models.random_shapes import without_weights

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel


MERGED_TOLERANCE = 1e-3  # nats of a log-probability, times its size where that is above 1
_CHECKED_TOKENS = 8
_TRAINING_ALONE = ".lora_monteclora_sampler."  # tensors that PEFT reads in training and never in evaluation


def check_adapter(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UserError unless the adapter in ``folder`` fits a base model of this config and can be merged into it.

    Only names and shapes are compared, on the meta device. What the adapter says its base is called does not matter.
    """
    from peft import get_peft_model, get_peft_model_state_dict

    options = read_options(folder)
    base = without_weights(config)
    with torch.device("meta"), _peft_at_work(folder, "cannot be put on this model"):
        tuned = get_peft_model(base, options)
        expected = get_peft_model_state_dict(tuned)
    _refuse_shared_ends(folder, base, config)
    _refuse_bias_without_place(folder, options, base)
    _refuse_other_tensors(folder, {name: tuple(tensor.shape) for name, tensor in expected.items()})
    if not options.kasa_config:  # which takes the base's weights apart, and here they are none
        with torch.device("meta"), _peft_at_work(folder, "cannot be merged"):
            tuned.merge_and_unload()


def merge_adapter(model: "PreTrainedModel", folder: Path) -> "PreTrainedModel":
    """Add the adapter's update to the weights of ``model``, in the model's dtype, and return it without PEFT modules.

    The caller passes a model in ``merging_dtype`` and casts afterwards: adding in bfloat16 would lose small updates.
    Raises UserError if the merged model's log-probabilities of a few tokens are not those of PEFT's unmerged one.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel

    dtype = model.dtype
    assert dtype in (torch.float32, torch.float64), f"an adapter is merged in float32 or float64, not {dtype}"
    with _peft_at_work(folder, "cannot be put on this model"):
        tuned = PeftModel.from_pretrained(
            model, str(folder), config=read_options(folder), torch_device=str(model.device)
        )
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    tuned.eval()
    with _peft_at_work(folder, "does not run"):
        expected = _log_probabilities(tuned, model.config.vocab_size)
    with _peft_at_work(folder, "cannot be merged"):
        merged: Any = tuned.merge_and_unload(safe_merge=True)
    assert isinstance(merged, PreTrainedModel)
    _refuse_other_answers(folder, expected, _log_probabilities(merged.eval(), model.config.vocab_size))
    return merged


def merging_dtype(folder: Path, dtype: torch.dtype) -> torch.dtype:
    """What to load the base in: float64 if it is to run in it, else float32, which PEFT's decompositions need."""
    return torch.float64 if dtype == torch.float64 and not changes_base(read_options(folder)) else torch.float32


def _changed_modules(base: nn.Module) -> dict[str, "BaseTunerLayer"]:
    """Name in the base -> PEFT's layer, for every module that the adapter really matches."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}


def _refuse_shared_ends(folder: Path, base: "PreTrainedModel", config: PreTrainedConfig) -> None:
    """Merging into a weight that two modules share would change both, where PEFT changes one."""
    if not config.tie_word_embeddings:
        return
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    shared = [name for name, module in _changed_modules(base).items() if module in ends]
    if shared:
        raise UserError(
            f"adapter '{folder}' changes {', '.join(name.rpartition('.')[2] for name in shared)}, "
            "which this model shares between embedding and unembedding"
        )


def _refuse_bias_without_place(folder: Path, options: "LoraConfig", base: "PreTrainedModel") -> None:
    """``lora_bias`` adds to a module's bias, so that a module without one has nowhere to merge it."""
    if not options.lora_bias:
        return
    for name, module in _changed_modules(base).items():
        if getattr(module.get_base_layer(), "bias", None) is None:
            raise UserError(
                f"adapter '{folder}' cannot be merged: "
                f"it has a bias (lora_bias) for {name}, which has none to add it to"
            )


def _refuse_other_tensors(folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    found = _tensor_shapes(folder)
    for name, shape in found.items():
        if _TRAINING_ALONE in name:
            continue
        if name not in expected:
            raise UserError(f"adapter '{folder}' was made for another base: the model has no place for tensor {name}")
        if shape != expected[name]:
            raise UserError(
                f"adapter '{folder}' was made for another base: tensor {name} is {_by(shape)}, "
                f"model has {_by(expected[name])}"
            )
    missing = sorted(set(expected) - set(found))
    if missing:
        raise UserError(f"adapter '{folder}' does not fit: its file lacks {len(missing)} tensors, first {missing[0]}")


@torch.no_grad()
def _log_probabilities(model: nn.Module, vocabulary: int) -> torch.Tensor:
    """Log-probabilities after each of a few tokens spread over the vocabulary: T V."""
    ids = torch.linspace(0, vocabulary - 1, _CHECKED_TOKENS).long().to(next(model.parameters()).device)
    logits_TV: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits_TV.double().log_softmax(-1)


def _refuse_other_answers(folder: Path, expected: torch.Tensor, found: torch.Tensor) -> None:
    off = ((found - expected).abs() / expected.abs().clamp(min=1)).max().item()
    if not off <= MERGED_TOLERANCE:  # NaN too
        raise UserError(
            f"adapter '{folder}' cannot be merged: the merged model's log-probabilities are off by {off:.3g} of PEFT's "
            f"unmerged ones (at most {MERGED_TOLERANCE:g} is rounding)"
        )


@contextlib.contextmanager
def _peft_at_work(folder: Path, what: str) -> Iterator[None]:
    """PEFT raises errors of many classes for options that it cannot follow; each becomes one line that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if "arget modules" in str(error):
            what = "was made for another base"
        raise UserError(f"adapter '{folder}' {what}: {first_line_of(error)}") from error


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor; raises UserError for one with NaN, infinities or quantised numbers."""
    file, shapes = folder / "adapter_model.safetensors", dict[str, tuple[int, ...]]()
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if not tensor.is_floating_point() or not tensor.isfinite().all():
                    raise UserError(f"adapter '{folder}': tensor {name} is not of finite floating-point numbers")
                shapes[name] = tuple(tensor.shape)
            return shapes
    except UserError:
        raise
    except Exception as error:  # safetensors raises its own class for a damaged header
        raise UserError(f"adapter file '{file}' cannot be read: {first_line_of(error)}") from error


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
