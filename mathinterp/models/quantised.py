"""Layers quantised to 8 or 4 bits as they are loaded, through transformers and bitsandbytes.

Knows what can be quantised, and how; loads nothing.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.models.sources import Source
from mathinterp.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

LOAD_IN = ("8bit", "4bit")


def check_quantised(spec: ModelSpec, source: Source, device_type: str, elsewhere: bool = False) -> None:
    """Raise UserError for what bitsandbytes cannot quantise, or not here, unless the model is loaded ``elsewhere``."""
    if spec.load_in not in LOAD_IN:
        raise UserError(f"`load_in` '{spec.load_in}' is not known (known: {', '.join(LOAD_IN)})")
    if source.kind != "folder":
        what = "random weights" if source.kind == "random" else "a .gguf file"
        raise UserError(f"`load_in` {spec.load_in}: {what} cannot be quantised; give a Hugging Face folder or hub id")
    if spec.adapter is not None:
        raise UserError(f"`load_in` {spec.load_in}: merge the adapter into its base first ('mathinterp tune merge')")
    if device_type != "cuda":
        raise UserError(f"`load_in` {spec.load_in} needs a GPU, and this model would run on a CPU; leave it out")
    if not elsewhere and find_spec("bitsandbytes") is None:
        raise UserError(
            f"`load_in` {spec.load_in} needs the package bitsandbytes, here and on every node that computes:"
            " pip install bitsandbytes (or the extra mathinterp[quantised])"
        )


def quantization_config(load_in: str, dtype: "torch.dtype") -> Any:
    """What transformers is given: LLM.int8() or NF4, computed in ``dtype``."""
    from transformers import BitsAndBytesConfig

    if load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
