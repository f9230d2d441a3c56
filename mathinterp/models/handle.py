"""A model to ask questions of: by name, or an object that is already in memory.

Knows how a model is found, lent for forward passes and sent to other processes; knows nothing about prompts. A lent
object is given back as it was: no hook, attribute, mode, gradient flag or attention implementation is left changed.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import DTYPES, LoadedModel, ModelSpec, ResolvedModel, load, resolve
from mathinterp.models.families import family_of
from mathinterp.models.fingerprint import plain_config
from mathinterp.models.loading import check_finite_weights
from mathinterp.models.sources import Source


class ModelSource(Protocol):
    """What a replica needs to have the model: plain data that travels to other processes."""

    def resolve(self, device_type: str) -> ResolvedModel:
        """Found and looked at, not loaded."""

    def load(self, resolved: ResolvedModel, device: str) -> LoadedModel:
        """In memory of this process, ready for forward passes."""


@dataclass(frozen=True)
class NamedSource:
    """A model that every machine finds under the same name."""

    spec: ModelSpec

    def resolve(self, device_type: str) -> ResolvedModel:
        """See catalog.resolve."""
        return resolve(self.spec, device_type)

    def load(self, resolved: ResolvedModel, device: str) -> LoadedModel:
        """See catalog.load."""
        return load(resolved, device)


@dataclass(frozen=True)
class CarriedSource:
    """A model that travels with its weights, parameters and buffers by name, on the CPU."""

    described: ResolvedModel
    model_class: type[PreTrainedModel]
    tensors: dict[str, torch.Tensor] = field(repr=False)

    def resolve(self, device_type: str) -> ResolvedModel:
        """What the object was when it was wrapped."""
        return self.described

    def load(self, resolved: ResolvedModel, device: str) -> LoadedModel:
        """Build the class from its config and put the carried tensors in; raises UserError if one has no place."""
        with torch.device("meta"):
            model = self.model_class(resolved.config)
        for name, tensor in self.tensors.items():
            _put(model, name, tensor.to(device))
        model.tie_weights()
        left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
        if left:
            raise UserError(f"model '{resolved.label}' cannot be carried: {left[0]} has no value of its own")
        backend = family_of(resolved.config.model_type).attention_backend
        model.set_attn_implementation(backend)
        model.eval().requires_grad_(False)
        model.config.use_cache = False
        return LoadedModel(model, resolved.tokenizer, Anatomy(model), resolved.fingerprint, resolved.dtype)


class Model:
    """A model by name; its weights are loaded the first time they are needed in this process, and kept.

    Args:
        spec: as given on the command line.
        device: "cpu" or "cuda"; None = a GPU where there is one.
    Raises UserError as ``catalog.resolve`` does.
    """

    def __init__(self, spec: ModelSpec, device: str | None = None):
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.source: ModelSource = NamedSource(spec)
        self.described = self.source.resolve(self.device)
        self._loaded: LoadedModel | None = None

    @property
    def label(self) -> str:
        """A short name for tables."""
        return self.described.label

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the content: weights, config, tokenizer, adapter."""
        return self.described.fingerprint

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's fast tokenizer."""
        return self.described.tokenizer

    @contextlib.contextmanager
    def lent(self) -> Iterator[LoadedModel]:
        """The model in this process's memory, for forward passes inside the block."""
        if self._loaded is None:
            self._loaded = self.source.load(self.described, self.device)
        yield self._loaded

    def carried(self) -> ModelSource:
        """How another process gets the same model."""
        return self.source

    def __repr__(self) -> str:
        return f"<Model {self.label}, {self.described.dtype}, {self.fingerprint}>"


class WrappedModel(Model):
    """An object in memory; its content is its identity. It stays where it is, and comes back as it was.

    Args:
        model: a causal language model of a known family, whole on one device.
        tokenizer: its fast tokenizer.
        name: for tables.
    Raises UserError for an unknown family, a slow tokenizer, weights of several dtypes or devices, or NaN.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
        if not tokenizer.is_fast:
            raise UserError(f"model '{name}' has no fast tokenizer, which is needed to know which token is what")
        kinds = {(str(each.device), each.dtype) for each in model.parameters()}
        if len(kinds) != 1:
            raise UserError(f"model '{name}' has weights of several dtypes or devices; bring them to one first")
        check_finite_weights(model, name)
        dtype = next(label for label, kind in DTYPES.items() if kind == model.dtype)
        self._model = model
        self.device = model.device.type
        self.described = ResolvedModel(
            spec=ModelSpec(name, dtype=dtype), source=Source("memory", name, None), adapter=None, config=model.config,
            tokenizer=tokenizer, shape=model_shape(model.config), fingerprint=content_fingerprint(model, tokenizer),
            dtype=dtype, label=name,
        )  # fmt: skip

    @contextlib.contextmanager
    def lent(self) -> Iterator[LoadedModel]:
        """The object itself, in evaluation mode without gradients, for the block; then as it was before."""
        if content_fingerprint(self._model, self.tokenizer) != self.fingerprint:
            raise UserError(f"model '{self.label}' has changed since it was wrapped; wrap it again")
        model, config = self._model, self._model.config
        modes = [(module, module.training) for module in model.modules()]
        gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        cached, backend = config.use_cache, config._attn_implementation
        try:
            model.eval().requires_grad_(False)
            config.use_cache = False
            model.set_attn_implementation(family_of(config.model_type).attention_backend)
            yield LoadedModel(model, self.tokenizer, Anatomy(model), self.fingerprint, self.described.dtype)
        finally:
            model.set_attn_implementation(backend)
            config.use_cache = cached
            for module, training in modes:
                module.training = training
            for parameter, wanted in gradients:
                parameter.requires_grad_(wanted)

    def carried(self) -> ModelSource:
        """With its weights, copied to the CPU."""
        tensors = {
            name: each.detach().cpu() for name, each in [*self._model.named_parameters(), *self._model.named_buffers()]
        }
        return CarriedSource(self.described, type(self._model), tensors)


def content_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of weights, buffers, config and tokenizer of an object in memory; not of its device."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    backend: Any = tokenizer
    digest.update(json.dumps(plain_config(model.config.to_dict()), sort_keys=True, default=str).encode())
    digest.update(backend.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer, named as named_parameters does."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    elif leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        raise UserError(f"the model has no place for the tensor {name}")
