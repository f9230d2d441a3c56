"""A model to ask questions of, by name; an object that is already in memory is one too, see wrapped.py.

Knows how a model is found, lent for forward passes and sent to other processes; knows nothing about prompts. Imports
nothing heavy before a model is looked at.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

from mathinterp.errors import UserError
from mathinterp.models.fingerprint import model_fingerprint, quantised_fingerprint
from mathinterp.models.resolved import ResolvedModel
from mathinterp.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.models.catalog import LoadedModel


class ModelSource(Protocol):
    """What a replica needs to have the model."""

    def resolve(self, device_type: str) -> ResolvedModel:
        """Found and looked at, not loaded."""

    def load(self, resolved: ResolvedModel, device: str, further: Sequence[str] = ()) -> "LoadedModel":
        """In memory of this process, ready for forward passes; its layers dealt out to ``further`` devices too."""


@dataclass(frozen=True)
class NamedSource:
    """A model that every machine finds under the same name."""

    spec: ModelSpec

    def resolve(self, device_type: str) -> ResolvedModel:
        """See catalog.resolve."""
        from mathinterp.models.catalog import resolve

        return resolve(self.spec, device_type)

    def load(self, resolved: ResolvedModel, device: str, further: Sequence[str] = ()) -> "LoadedModel":
        """See catalog.load."""
        from mathinterp.models.catalog import load

        return load(resolved, device, further)


@dataclass(frozen=True)
class HeldSource:
    """A model of this process: loaded, or lent, while ``until`` is open. Goes nowhere else."""

    model: "Model"
    until: contextlib.ExitStack

    def resolve(self, device_type: str) -> ResolvedModel:
        """See Model.described."""
        return self.model.described

    def load(self, resolved: ResolvedModel, device: str, further: Sequence[str] = ()) -> "LoadedModel":
        """See Model.lent; it stays on its device."""
        assert not further
        return self.until.enter_context(self.model.lent())


def unchanged(known: ResolvedModel) -> bool:
    """Whether a model's files are what they were when it was resolved."""
    if known.source.path is None:
        return True
    try:
        found = model_fingerprint(known.source, known.adapter, known.spec.trust_remote_code)
        return quantised_fingerprint(found, known.spec.load_in) == known.fingerprint
    except (OSError, ValueError):
        return False


def load_unchanged(resolved: ResolvedModel, device: str, further: Sequence[str] = ()) -> "LoadedModel":
    """``catalog.load``; raises UserError for files that are no longer those that were resolved, perhaps long ago."""
    from mathinterp.models.catalog import load

    loaded = load(resolved, device, further)
    if not unchanged(resolved):
        raise UserError(f"the files of model '{resolved.label}' have changed since it was looked at; ask for it again")
    return loaded


class Model:
    """A model by name; its weights are loaded the first time they are needed in this process, and kept.

    Args:
        spec: as given on the command line.
        device: "cpu" or "cuda" in this process; None = a GPU where there is one.
    """

    in_memory_alone: ClassVar[bool] = False  # True: it has no name, and no file

    def __init__(self, spec: ModelSpec, device: str | None = None):
        self.spec = spec
        self._device = device
        self._loaded: LoadedModel | None = None

    @property
    def device(self) -> str:
        """ "cpu" or "cuda": where it is, or will be loaded, in this process."""
        if self._device is not None:
            return self._device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def described(self) -> ResolvedModel:
        """Found and looked at for this process's device; raises UserError as ``catalog.resolve`` does."""
        import torch

        from mathinterp.models.catalog import resolve

        return resolve(self.spec, self.device, self.device != "cuda" or torch.cuda.is_bf16_supported())

    def described_on(self, device_type: str) -> ResolvedModel:
        """The same for other machines' device, which decides what the dtype "auto" means."""
        from mathinterp.models.catalog import resolve

        return resolve(self.spec, device_type)

    @property
    def label(self) -> str:
        """A short name for tables."""
        return self.described.label

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the content: weights, config, tokenizer, adapter."""
        return self.described.fingerprint

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's fast tokenizer."""
        return self.described.tokenizer

    @contextlib.contextmanager
    def lent(self) -> Iterator["LoadedModel"]:
        """The model in this process's memory, for forward passes inside the block."""
        if self._loaded is None:
            self._loaded = load_unchanged(self.described, self.device)
        yield self._loaded

    def carried(self, described: ResolvedModel) -> ModelSource:
        """How other processes get the model; the dtype is the driver's, so that "auto" means the same everywhere."""
        return NamedSource(replace(described.spec, dtype=described.dtype))

    @property
    def carried_bytes(self) -> int:
        """What travels with ``carried``."""
        return 0

    def __repr__(self) -> str:
        return f"<Model {self.label}, {self.described.dtype}, {self.fingerprint}>"


def model_of(given: "Model | ModelSpec | str") -> Model:
    """The model itself, or the one of that name; raises UserError for anything else."""
    if isinstance(given, str | ModelSpec):
        return Model(ModelSpec(given) if isinstance(given, str) else given)
    if not isinstance(given, Model):
        raise UserError(f"`model` is a {type(given).__name__}: give a name, or a model that `load` or `wrap` returned")
    return given


def named_spec(given: "Model | ModelSpec | str") -> ModelSpec:
    """How other processes find the model by themselves; raises UserError for one that is in memory alone."""
    model = model_of(given)
    if model.in_memory_alone:
        raise UserError(
            f"model '{model.label}' is in memory alone, and this needs its folder: save it and its tokenizer with"
            " save_pretrained and give the folder's path"
        )
    return model.spec
