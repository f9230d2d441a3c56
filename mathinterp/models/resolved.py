"""A model that was found and looked at, as plain facts; imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.models.shape import ModelShape
from mathinterp.models.sources import Source
from mathinterp.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}  # of each dtype that is known


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found and looked at, but not loaded."""

    spec: ModelSpec
    source: Source
    adapter: Path | None
    config: "PreTrainedConfig"
    tokenizer: "PreTrainedTokenizerBase"
    shape: ModelShape
    fingerprint: str  # 16 hex digits: weights, config, tokenizer, adapter, how it is quantised; not the dtype
    dtype: str  # a name of DTYPE_BYTES, never "auto"
    label: str


def resolve_dtype(dtype: str, device_type: str, bfloat16_supported: bool = True) -> str:
    """The dtype's name, with ``auto`` made plain; raises UserError for one that is not known."""
    if dtype == "auto":
        if device_type == "cpu":
            return "float32"
        return "bfloat16" if bfloat16_supported else "float16"
    if dtype not in DTYPE_BYTES:
        raise UserError(f"dtype '{dtype}' is not known (known: auto, {', '.join(DTYPE_BYTES)})")
    return dtype
