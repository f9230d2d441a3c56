"""Where weights lie in a CPU's memory: in this process's own, at the boundaries that decide last bits.

On processors that are not Intel's, the matrix products of MKL take other steps for data that does not start at a
boundary of 64 bytes. Tensors that torch allocates do; those mapped from a file, or taken from NumPy, start anywhere,
and not at the same place in every process. What is mapped from a file, moreover, changes with the file.
"""

import torch
from torch import nn

BOUNDARY = 64  # bytes


@torch.no_grad()
def align(model: nn.Module) -> None:
    """Copy parameters and buffers that do not start at a boundary, or are mapped, to where they do; values stay."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % BOUNDARY or not tensor.untyped_storage().resizable():  # not of torch's own memory
            tensor.data = tensor.data.clone()
