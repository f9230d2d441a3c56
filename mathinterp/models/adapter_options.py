"""What the options in a LoRA adapter's ``adapter_config.json`` mean for merging: honoured as PEFT does, or refused.

Knows PEFT's LoraConfig, option by option; knows nothing about tensors or models. ``init_lora_weights`` is about more
than training: some ways of initialising also change the base weights. Where PEFT changes them again, in the same way,
when it loads the adapter, so do we; the other ways leave an adapter that no longer fits the base it is given.
"""

import json
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from mathinterp.errors import UserError, first_line_of
from mathinterp.gates import shortened
from mathinterp.models.fingerprint import INERT_ADAPTER
from mathinterp.prompts.json_lines import json_file

if TYPE_CHECKING:
    from peft import LoraConfig


# Ways of initialising that leave the base as it is: A and B come from the adapter's file.
_BASE_KEPT = {"gaussian", "eva", "orthogonal", "mica"}
# PEFT takes these factors of the base's own weights out of them, at loading as before training.
_BASE_CHANGED_AGAIN = {"pissa", "olora"}
_CONVERT = (
    "give the adapter that PEFT saves with path_initial_model_for_weight_conversion; or, if the model given is the "
    "changed base itself, set init_lora_weights to true in adapter_config.json"
)
_BASE_LOST = {
    "pissa_niter_": ("approximates the base's factors at random, each time others", _CONVERT),
    "corda": ("changed the base by data that the adapter does not hold", _CONVERT),
    "lora_ga": ("changed the base by gradients that the adapter does not hold", _CONVERT),
    "loftq": (
        "fits the base as it was quantised",
        "save that base dequantised and give it as the model, with init_lora_weights set to true in "
        "adapter_config.json",
    ),
}
# Options that no sum of weights can express, and why.
_UNMERGEABLE = {
    "alora_invocation_tokens": "it acts from its invocation tokens on and not before (aLoRA)",
    "arrow_config": "it chooses among adapters token by token (Arrow)",
    "layer_replication": "it repeats layers of its base, so that the model would be another one",
    "megatron_config": "it is for Megatron's own modules",
}


def read_options(folder: Path) -> "LoraConfig":
    """The adapter's options, ready for PEFT to load it; raises UserError for any that cannot be honoured by merging."""
    from peft import LoraConfig, PeftConfig, PeftType  # which takes seconds

    _check_fields(folder)
    try:
        options = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever the file makes PEFT raise, it is the file that is wrong
        raise UserError(f"adapter '{folder}': adapter_config.json is not readable: {first_line_of(error)}") from error
    if not isinstance(options, LoraConfig) or options.peft_type != PeftType.LORA:
        raise UserError(f"adapter '{folder}' is of type {options.peft_type}: only LoRA adapters can be merged")
    _refuse_unmergeable(folder, options)
    _refuse_lost_base(folder, options.init_lora_weights)
    if not changes_base(options):
        options.init_lora_weights = False  # what would be drawn is overwritten by the file
    options.monteclora_config = None  # draws while training alone: in evaluation it is a plain LoRA
    options.inference_mode = True
    # PEFT would look for a base of this name; whether the adapter fits is judged by its tensors.
    options.base_model_name_or_path = None
    return options


def changes_base(options: "LoraConfig") -> bool:
    """Whether loading the adapter changes the base's weights by more than adding B A to them."""
    return options.init_lora_weights in _BASE_CHANGED_AGAIN or bool(options.kasa_config)


def _check_fields(folder: Path) -> None:
    """PEFT takes values of any type, and drops options that it does not know, with a warning: the model would be
    another than the file's.
    """
    from peft import LoraConfig

    fields = json_file(folder / "adapter_config.json")
    if fields.get("peft_type") != "LORA":
        return  # refused by its type
    kinds = {**get_type_hints(LoraConfig), "lora_alpha": float, "init_lora_weights": bool | str | None}
    unknown = sorted(name for name, value in fields.items() if name not in kinds and value)
    if unknown:
        raise UserError(
            f"adapter '{folder}' has options that this version of PEFT does not know ({', '.join(unknown)}), so it "
            "would be another adapter: install a newer peft"
        )
    for name, value in fields.items():
        if name in kinds and name not in INERT_ADAPTER and not _is_of(value, kinds[name]):
            raise UserError(
                f"adapter '{folder}': adapter_config.json sets {name} to {shortened(json.dumps(value))}, which is not "
                "of the type that PEFT reads there"
            )


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of an annotated type; a tuple is a list there, and a dataclass an object."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is list:
        return isinstance(value, list) and all(_is_of(each, arguments[0]) for each in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(_is_of, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(each, arguments[1]) for each in value.values())
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _refuse_unmergeable(folder: Path, options: "LoraConfig") -> None:
    """Whole replaced modules and touched embeddings would change the vocabulary or both ends of tied weights."""
    whole = list(options.modules_to_save or [])
    if options.trainable_token_indices:
        whole.append("token embeddings")
    if whole:
        raise UserError(
            f"adapter '{folder}' also replaces whole modules ({', '.join(whole)}): merge it into its base with PEFT, "
            "save the result, and give that folder as the model"
        )
    for name, why in _UNMERGEABLE.items():
        if getattr(options, name, None):
            raise UserError(f"adapter '{folder}' cannot be merged ({name}): {why}")


def _refuse_lost_base(folder: Path, init: Any) -> None:
    if init is None or isinstance(init, bool) or init in _BASE_KEPT | _BASE_CHANGED_AGAIN:
        return
    for name, (why, advice) in _BASE_LOST.items():
        if str(init).startswith(name):
            raise UserError(f"adapter '{folder}' (init_lora_weights: {init}) {why}: {advice}")
    raise UserError(f"adapter '{folder}': init_lora_weights '{init}' is not known, so its base may be another one")
