"""From files to a model in memory that is known to be whole: every weight present, used, and a number.

Knows how transformers loads; knows nothing about names, fingerprints or prompts.
"""

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers.utils.logging as transformers_logging
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig

from mathinterp.errors import UserError, one_line_of
from mathinterp.models.adapters import merge_adapter, merging_dtype
from mathinterp.models.dropped import is_mask, refuse_dropped
from mathinterp.models.families import family_of
from mathinterp.models.quantised import quantization_config
from mathinterp.models.sharded import kept_here
from mathinterp.models.sources import weight_files
from mathinterp.models.split import connect, device_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # whose import takes seconds and 130 MB, which a driver does without


_FLOATING = {"F64", "F32", "F16", "BF16"}  # as safetensors names dtypes


def load_weights(
    folder: Path,
    config: PreTrainedConfig,
    *,
    device: torch.device,
    further: Sequence[torch.device] = (),
    dtype: torch.dtype,
    gguf_file: str | None = None,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    load_in: str | None = None,
) -> "PreTrainedModel":
    """Load a checkpoint onto ``device`` in ``dtype``, layers onto ``further`` ones too, with the adapter merged in.

    With an adapter the weights are read and merged in float32 (float64 if that is ``dtype``) and then cast, so that
    for a moment a 16-bit model takes twice its memory. Raises UserError for missing, left-over or misshapen weights.
    """
    cards = [device, *further]
    reading_dtype = merging_dtype(adapter, dtype) if adapter else dtype
    model = _read(folder, config, cards, reading_dtype, gguf_file, trust_remote_code, load_in)
    if len(cards) > 1:
        without_dispatch(model)
        connect(model)
    _refuse_untied(folder, model)
    if gguf_file is None:
        refuse_dropped(folder, model)
    if adapter is not None:
        with quiet_transformers():
            model = merge_adapter(model, adapter)
        cast_parameters(model, dtype)
    return model


def check_stored(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UserError unless the folder's tensors are floating-point numbers, of the names and shapes that a model of
    this config has. Their headers alone are read, by the steps of ``load_weights``.
    """
    count = 0
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                kinds = {name: str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"model '{folder}' cannot be loaded: {file.name}: {one_line_of(error)}") from error
        count += len(kinds)
        for name, kind in kinds.items():
            if kind not in _FLOATING and not is_mask(name):
                raise UserError(
                    f"model '{folder}' holds {name} as {kind}, quantised numbers that its config.json says nothing of: "
                    "give the unquantised weights or a .gguf file"
                )
    if config.num_hidden_layers > count:
        raise UserError(
            f"model '{folder}' lacks weights that the model needs: config.json says {config.num_hidden_layers:,} "
            f"layers, and there are {count} tensors"
        )
    _read(folder, config, [torch.device("meta")], torch.float32)


def _read(
    folder: Path, config: PreTrainedConfig, cards: Sequence[torch.device], dtype: torch.dtype,
    gguf_file: str | None = None, trust_remote_code: bool = False, load_in: str | None = None,
) -> "PreTrainedModel":  # fmt: skip
    from transformers import PreTrainedModel

    where: dict[str, Any] = {"use_safetensors": True}
    if gguf_file is not None:
        where = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        _name_tensors_once()
    if load_in is not None:
        where["quantization_config"] = quantization_config(load_in, dtype)
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map={"": cards[0]} if len(cards) == 1 else device_map(config, cards),
                attn_implementation=family_of(config.model_type).attention_backend,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name, where transformers only points at its log
                **where,
            )
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(f"model '{folder}' cannot be loaded: {one_line_of(error)}") from error
    model, report = loaded  # a pair because of output_loading_info
    assert isinstance(model, PreTrainedModel)
    _refuse_incomplete(folder, report)
    return model


def without_dispatch(model: "PreTrainedModel") -> None:
    """Take away what accelerate puts around the forward of every module: copies of a module would call the original."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        vars(module).pop("forward", None)


def prepare(model: "PreTrainedModel", label: str) -> "PreTrainedModel":
    """Evaluation mode, no gradients, no key/value cache; raises UserError if a weight is not a finite number."""
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    check_finite_weights(model, label)
    return model


def check_finite_weights(model: "PreTrainedModel", label: str) -> None:
    """Raise UserError naming the first tensor that has NaN or infinity."""
    names, finite = [], []
    for name, parameter in model.named_parameters():
        names.append(name)
        finite.append(torch.isfinite(kept_here(parameter)).all().to(model.device))
    bad = [name for name, good in zip(names, torch.stack(finite).tolist(), strict=True) if not good]
    if bad:
        raise UserError(
            f"model '{label}' has NaN or infinite weights in {len(bad)} of {len(names)} tensors "
            f"(as {str(model.dtype).removeprefix('torch.')}), first {bad[0]}"
        )


def cast_parameters(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as rotary frequencies stay in float32, as when loaded in ``dtype``."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _name_tensors_once() -> None:
    """Have gguf keep its map of tensor names, which transformers asks for once for each module: 16 s for 46 layers."""
    import gguf

    if not hasattr(gguf.get_tensor_name_map, "cache_info"):
        gguf.get_tensor_name_map = functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back warnings and transformers' progress bars inside the block; what they report is checked here instead."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _refuse_incomplete(folder: Path, report: dict[str, Any]) -> None:
    """A weight that is missing would be drawn at random, one left over would be ignored: both give wrong numbers."""
    for kind, what in (
        ("missing_keys", "lacks weights that the model needs"),
        ("unexpected_keys", "holds weights that the model has no place for"),
        ("mismatched_keys", "holds weights of another shape than its config says"),
    ):
        names = sorted(_named(entry) for entry in report[kind])
        if names:
            raise UserError(f"model '{folder}' {what}: {len(names)} in all, first {names[0]}")


def _refuse_untied(folder: Path, model: "PreTrainedModel") -> None:
    """transformers leaves apart what the config ties where a file holds two different matrices."""
    one, other = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.tie_word_embeddings and one.weight is not other.weight:
        raise UserError(
            f"model '{folder}' holds an unembedding that is not its embedding, but its config.json says that they are "
            "one (tie_word_embeddings): correct the config, or take the wrong one out of the weights"
        )


def _named(entry: str | tuple[str, Any, Any]) -> str:
    """A tensor's name, with its shape in the file and in the model where transformers' report gives them."""
    if isinstance(entry, str):
        return entry
    name, found, expected = entry
    return f"{name} ({' x '.join(map(str, found))} instead of {' x '.join(map(str, expected))})"
