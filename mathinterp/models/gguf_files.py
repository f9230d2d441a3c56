"""GGUF files: what is slow to read from them is read once and kept in the cache as a Hugging Face folder.

Reading the header of a small model takes 10 s and its weights 20 s (transformers decodes them in Python). What
transformers makes of a file is held against the file next door (gguf_settings.py, gguf_tensors.py, gguf_tokenizer.py).
Knows transformers' GGUF reading; knows nothing about names or adapters.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from mathinterp.errors import UserError, one_line_of
from mathinterp.models.cache import cache_folder
from mathinterp.models.families import family_of
from mathinterp.models.gguf_metadata import read_gguf
from mathinterp.models.gguf_settings import apply_settings
from mathinterp.models.gguf_tensors import apply_tensors
from mathinterp.models.gguf_tokenizer import file_tokenizer
from mathinterp.models.loading import load_weights
from mathinterp.models.random_shapes import without_weights

_CHECKS = 1  # counts the ways in which headers were read and checked: one kept under another number is read again
_KEPT_PARAMETERS = 500_000_000  # the weights of larger models (2 GB in float32) are not copied into the cache


def gguf_header(file: Path, digest: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of ``file``, whose content hashes to ``digest``.

    Raises UserError for an architecture that transformers cannot read, and where a setting, a tensor or a part of the
    tokenizer would be passed over.
    """
    folder = _entry(f"header-{_CHECKS}", digest)
    if folder.is_dir():
        try:
            return AutoConfig.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception:  # tokenizers has no exception class of its own; whatever the damage, read the file again
            shutil.rmtree(folder, ignore_errors=True)
    try:
        metadata = read_gguf(file)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        built = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # a damaged file ends anywhere in the parsers, in errors of every class
        raise UserError(f"GGUF file '{file}' cannot be read: {one_line_of(error)}") from error
    family_of(config.model_type)
    apply_settings(metadata, config)
    apply_tensors(metadata, config)
    tokenizer = file_tokenizer(metadata, built)

    def save(temporary: Path) -> None:
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    _keep(folder, save)
    return config, tokenizer


def gguf_weights(file: Path, digest: str, config: PreTrainedConfig) -> tuple[Path, str | None]:
    """(folder, GGUF file name in it or None): where to load the weights of ``file`` from.

    A small model is converted to float32 safetensors in the cache, which loads in a second; a large one, or any where
    the cache cannot be written, is read from the GGUF file itself. The weights are the same.
    """
    folder = _entry("weights", digest)
    if (folder / "model.safetensors").is_file():
        return folder, None
    original = file.parent, file.name
    if without_weights(config).num_parameters() > _KEPT_PARAMETERS:
        return original
    model = load_weights(file.parent, config, device=torch.device("cpu"), dtype=torch.float32, gguf_file=file.name)
    # named_parameters() names tied weights once, as transformers' own files do.
    tensors = {name: parameter.data.contiguous() for name, parameter in model.named_parameters()}

    def save(temporary: Path) -> None:
        config.save_pretrained(temporary)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})

    _keep(folder, save)
    return (folder, None) if (folder / "model.safetensors").is_file() else original


def _entry(kind: str, digest: str) -> Path:
    return cache_folder() / "gguf" / f"{kind}-{digest[:32]}-transformers-{transformers.__version__}"


def _keep(folder: Path, save: Callable[[Path], None]) -> None:
    """Write under a temporary name, then rename; a cache that cannot be written, or was just written, is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
    except OSError:
        return
    try:
        save(temporary)
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
