"""One model over several workers (FSDP2): each keeps its share of every layer and gathers the rest while a layer runs.

Embeddings, final norm and unembedding lie whole on every worker. All workers must run each layer equally often, because
gathering waits for all of them.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mathinterp.models.families import family_for
from mathinterp.models.split import layers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mathinterp.models.anatomy import Anatomy


def all_workers(device: torch.device) -> DeviceMesh:
    """The workers of the process group that is up, of which this one computes on ``device``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def shard_layer(layer: nn.Module, device: torch.device, workers: DeviceMesh) -> None:
    """Bring a layer, whole, to ``device`` and keep this worker's share of it."""
    fully_shard(layer.to(device), mesh=workers)


def shard_model(model: "PreTrainedModel", device: torch.device, workers: DeviceMesh) -> None:
    """Keep this worker's share of the layers, one after another, and bring all else to ``device``."""
    layers, family = layers_of(model), family_for(model.config)
    for layer in layers:
        if not is_sharded(layer):
            shard_layer(layer, device, workers)
    decoder = model.get_submodule(family.decoder)
    setattr(decoder, family.layers, nn.ModuleList())
    cast(nn.Module, model).to(device)
    whole = set(model.parameters())
    setattr(decoder, family.layers, layers)
    fully_shard(decoder, mesh=workers, ignored_params=whole)


def is_sharded(layer: nn.Module) -> bool:
    """Whether a worker keeps a share of this layer alone."""
    return isinstance(layer, FSDPModule)


def kept_here(parameter: torch.Tensor) -> torch.Tensor:
    """What this worker keeps of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def introduce(anatomy: "Anatomy") -> None:
    """Let sharded layers know each other, which FSDP does in the first forward pass: before any runs as a copy."""
    anatomy.decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=anatomy.device), use_cache=False)
