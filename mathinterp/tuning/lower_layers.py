"""The layers below the lowest trained one: their output does not change, so it can be kept across epochs.

Knows decoders and samples; knows nothing about losses or training.
Shapes: B rows, T tokens of a row, D model width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.attached import other_layers
from mathinterp.tuning.data import Sample
from mathinterp.tuning.layout import padded


def lowest_trained_layer(anatomy: Anatomy, model: nn.Module) -> int:
    """The first layer that holds a trained parameter; 0 if the embedding trains, all layers if only later parts do."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    holding = [i for i, layer in enumerate(anatomy.layers) if any(id(p) in trained for p in layer.parameters())]
    in_layers = {id(parameter) for layer in anatomy.layers for parameter in layer.parameters()}
    last = {id(parameter) for parameter in anatomy.final_norm.parameters()}
    if any(id(p) in trained - in_layers - last for p in anatomy.decoder.parameters()):
        return 0
    return min(holding, default=anatomy.shape.n_layers)


def cache_bytes(samples: Sequence[Sample], d_model: int, dtype: torch.dtype) -> int:
    """What an ``InputCache`` of all samples takes on each worker, for weights of ``dtype``."""
    return sum(len(sample.input_ids) for sample in samples) * d_model * dtype.itemsize


class InputCache:
    """The inputs of the lowest trained layer, kept in main memory sample by sample once they have been computed."""

    def __init__(self, anatomy: Anatomy, model: nn.Module, samples: Sequence[Sample], pad_id: int) -> None:
        """Raises UserError if nothing lies below, if the layers below drop out at random, or memory is too small."""
        self.first = lowest_trained_layer(anatomy, model)
        if not 0 < self.first < anatomy.shape.n_layers:
            raise UserError("`cache` keeps what lies below the lowest trained layer, but nothing does: leave it out")
        if _drops_out(anatomy, self.first):
            raise UserError("`cache`: layers below the lowest trained one drop out at random, so nothing can be kept")
        needed = cache_bytes(samples, anatomy.shape.d_model, anatomy.dtype) / 2**30
        free = psutil.virtual_memory().available / 2**30
        if needed > free:
            raise UserError(f"`cache` needs {needed:.1f} GiB of memory, and {free:.1f} GiB are free: leave it out")
        self._anatomy, self._samples, self._pad_id = anatomy, samples, pad_id
        self._kept: dict[int, torch.Tensor] = {}  # sample -> T D on the CPU
        self._layer_returns_tuple = False

    @contextmanager
    def standing_in(self, input_ids_BT: torch.Tensor, chosen: Sequence[int], places: torch.Tensor) -> Iterator[None]:
        """Inside the block the decoder's lower layers do nothing but hand on what was computed before.

        Args:
            input_ids_BT: the batch that the decoder is about to be called on.
            chosen: which samples it holds.
            places: their tokens' flat positions in it, sample by sample.
        """
        self._compute([index for index in chosen if index not in self._kept])
        values = torch.cat([self._kept[index] for index in chosen]).to(input_ids_BT.device)
        hidden = values.new_zeros(input_ids_BT.numel(), values.shape[-1])  # what is padded is seen by nothing
        hidden[places] = values
        given = _Given(hidden.view(*input_ids_BT.shape, -1), self._layer_returns_tuple)
        with other_layers(self._anatomy, [*[given] * self.first, *self._anatomy.layers[self.first :]]):
            yield

    @torch.no_grad()
    def _compute(self, missing: Sequence[int]) -> None:
        if not missing:
            return
        samples = [self._samples[index] for index in missing]
        batch = padded(samples, self._pad_id, self._anatomy.shape.positions)
        hidden_TD = self._inputs(batch["input_ids_BT"].to(self._anatomy.device)).flatten(0, 1)
        lengths = [len(sample.input_ids) for sample in samples]
        for index, kept_TD in zip(missing, hidden_TD.cpu()[batch["places"]].split(lengths), strict=True):
            self._kept[index] = kept_TD.clone()

    def _inputs(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        """B T D: run the decoder up to the lowest trained layer."""
        layers = self._anatomy.layers

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Reached(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        def look(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._layer_returns_tuple = isinstance(output, tuple)

        handles = [
            layers[self.first].register_forward_pre_hook(stop, with_kwargs=True),
            layers[0].register_forward_hook(look),
        ]
        try:
            self._anatomy.decoder(input_ids=input_ids_BT, use_cache=False)
        except _Reached as reached:
            return reached.hidden
        finally:
            for handle in handles:
                handle.remove()
        raise AssertionError("the lowest trained layer did not run")


class _Reached(Exception):
    """The lowest trained layer is about to run on ``hidden``."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Given(nn.Module):
    """A layer whose output is known."""

    def __init__(self, hidden: torch.Tensor, in_tuple: bool) -> None:
        super().__init__()
        self._output = (hidden,) if in_tuple else hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        """The known output."""
        return self._output


def _drops_out(anatomy: Anatomy, first: int) -> bool:
    """Whether a layer below ``first``, or the decoder before its layers, has a dropout probability above 0."""
    below = [module for layer in anatomy.layers[:first] for module in layer.modules()]
    modules = [*below, *anatomy.decoder.children()]
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any(_probability(getattr(module, name, 0)) > 0 for name in ("attention_dropout", "dropout"))
        for module in modules
    )


def _probability(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0  # some families keep a module under this name
