"""The part of a model that precise fine-tuning trains, as a mask."""

import torch

from mathinterp.tuning.precise import Part


def mask_of(model, part: Part) -> torch.Tensor:
    """True on the part's entries of the module's weight, as it is stored."""
    module = model.get_submodule(part.module)
    mask = torch.zeros_like(module.weight, dtype=torch.bool)
    input_major = mask if type(module).__name__ == "Conv1D" else mask.T
    if part.side == "rows":
        input_major[:, list(part.features)] = True
    else:
        input_major[list(part.features)] = True
    return mask
