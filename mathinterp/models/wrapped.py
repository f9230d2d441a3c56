"""A model that is an object in memory: what it is, how it is lent, and how it travels with its weights.

Knows tensors and modules; knows nothing about files. A lent object is given back as it was, see lending.py.
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.models.alignment import align
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import DTYPES, LoadedModel, ModelSpec, ResolvedModel
from mathinterp.models.families import family_of
from mathinterp.models.fingerprint import plain_config
from mathinterp.models.handle import Model, ModelSource
from mathinterp.models.lending import check_wrappable, restored
from mathinterp.models.loading import check_finite_weights, prepare
from mathinterp.models.sources import Source
from mathinterp.models.split import place_of_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_THREADS = 8  # that hash tensors side by side


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor as bytes, which Ray's object store keeps without a copy per reader."""

    bytes_n: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> "CarriedTensor":
        """From any device."""
        return CarriedTensor(_bytes(tensor), tensor.dtype, tuple(tensor.shape))

    def tensor(self, device: str) -> torch.Tensor:
        """A tensor of its own on ``device``."""
        return torch.from_numpy(self.bytes_n.copy()).view(self.dtype).reshape(self.shape).to(device)


@dataclass(frozen=True)
class CarriedSource:
    """A model that travels with its weights: parameters and buffers by name."""

    described: ResolvedModel
    model_class: "type[PreTrainedModel]"
    tensors: dict[str, CarriedTensor] = field(repr=False)

    def resolve(self, device_type: str) -> ResolvedModel:
        """What the object was when it was wrapped."""
        return self.described

    def load(self, resolved: ResolvedModel, device: str, further: Sequence[str] = ()) -> LoadedModel:
        """Build the class from its config and put the carried tensors in.

        Raises:
            UserError: the class, built anew, is not the object that was wrapped.
        """
        config: PreTrainedConfig = copy.deepcopy(resolved.config)
        config._attn_implementation = family_of(config.model_type).attention_backend
        with torch.device("meta"):
            model = self.model_class(config)
        place = place_of_tensor(config, [device, *further])
        for name, carried in self.tensors.items():
            _put(model, name, carried.tensor(place(name)))
        model.tie_weights()
        built = content_fingerprint(model, resolved.tokenizer) if not _unfilled(model) else None
        if built != resolved.fingerprint:
            raise UserError(
                f"model '{resolved.label}' cannot be sent to other processes: {self.model_class.__name__} built"
                " from its config is not the object that was wrapped; save it and load its folder, or run it here"
            )
        prepare(model, resolved.label)
        if device == "cpu":
            align(model)
        return LoadedModel(model, resolved.tokenizer, Anatomy(model), resolved.fingerprint, resolved.dtype)


class WrappedModel(Model):
    """An object in memory; its content is its identity. It stays where it is, and comes back as it was.

    Args:
        model: a causal language model of a known family, whole on one device.
        tokenizer: its fast tokenizer.
        name: for tables.
    Raises:
        UserError: an unknown family, a slow tokenizer, weights of several dtypes or devices, NaN, adapters that are
            not merged, or somebody's forward hooks.
    """

    in_memory_alone = True

    def __init__(self, model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase, name: str):
        check_wrappable(model, tokenizer, name)
        family_of(model.config.model_type, model.config.to_dict())
        check_finite_weights(model, name)
        dtype = next((label for label, kind in DTYPES.items() if kind == model.dtype), None)
        if dtype is None:
            raise UserError(f"model '{name}' has weights in {model.dtype}; bring them to one of {', '.join(DTYPES)}")
        super().__init__(ModelSpec(name, dtype=dtype), model.device.type)
        self._model = model
        self._described = ResolvedModel(
            spec=self.spec, source=Source("memory", name, None), adapter=None, config=copy.deepcopy(model.config),
            tokenizer=tokenizer, shape=model_shape(model.config), fingerprint=content_fingerprint(model, tokenizer),
            dtype=dtype, label=name,
        )  # fmt: skip

    @property
    def described(self) -> ResolvedModel:
        """What the object was when it was wrapped."""
        return self._described

    def described_on(self, device_type: str) -> ResolvedModel:
        """The same: its dtype is its own."""
        return self._described

    @contextlib.contextmanager
    def lent(self) -> Iterator[LoadedModel]:
        """The object itself, in evaluation mode without gradients, for the block; then as it was before.

        Raises:
            UserError: it has been trained, edited or hooked since it was wrapped.
        """
        model, described = self._model, self._described
        check_wrappable(model, self.tokenizer, self.label)
        if content_fingerprint(model, self.tokenizer) != self.fingerprint:
            raise UserError(f"model '{self.label}' has changed since it was wrapped; wrap it again")
        with restored(model):
            model.eval().requires_grad_(False)
            model.config.use_cache = False
            model.set_attn_implementation(family_of(model.config.model_type).attention_backend)
            if self.device == "cpu":
                align(model)
            yield LoadedModel(model, self.tokenizer, Anatomy(model), self.fingerprint, described.dtype)

    def carried(self, described: ResolvedModel) -> ModelSource:
        """With its weights, copied to the CPU; raises UserError if they are not those that were wrapped."""
        if content_fingerprint(self._model, self.tokenizer) != self.fingerprint:
            raise UserError(f"model '{self.label}' has changed since it was wrapped; wrap it again")
        tensors = {name: CarriedTensor.of(each) for name, each in _named_tensors(self._model)}
        return CarriedSource(described, type(self._model), tensors)

    @property
    def carried_bytes(self) -> int:
        """Of all parameters and buffers."""
        return sum(each.numel() * each.element_size() for _, each in _named_tensors(self._model))


def content_fingerprint(model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of modules, weights, buffers, config and tokenizer of an object in memory; not of its device."""
    named = sorted(_named_tensors(model), key=lambda item: item[0])
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(lambda item: hashlib.blake2b(_bytes(item[1]).data, digest_size=32).hexdigest(), named))
    tensors = [
        [name, str(each.dtype), list(each.shape), digest]
        for (name, each), digest in zip(named, digests, strict=True)
    ]  # fmt: skip
    backend: Any = tokenizer
    words = json.loads(backend.backend_tokenizer.to_str())
    words = {name: value for name, value in words.items() if name not in ("truncation", "padding")}  # of the last call
    modules = [[name, type(each).__qualname__, each.extra_repr()] for name, each in model.named_modules()]
    content = [modules, tensors, plain_config(model.config.to_dict()), words]
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, tied ones once."""
    return [*model.named_parameters(), *model.named_buffers()]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _unfilled(model: torch.nn.Module) -> bool:
    return any(tensor.is_meta for _, tensor in _named_tensors(model))


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer, named as named_parameters does; one without a place is left out."""
    owner, _, leaf = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        elif leaf in module._buffers:
            module._buffers[leaf] = tensor
