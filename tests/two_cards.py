"""Cards that are not there: tensors that say that they lie on one, and fail in any operation that mixes two.

A tensor ``OnCard`` computes on the CPU, but its device is ``meta:0``, ``meta:1``, ... and what it computes stays there.
Operations follow CUDA's rules: all tensors on one device, but for copies, numbers without dimensions and indices on the
CPU. So code that forgets a layer's card fails here as it would on two GPUs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

from mathinterp.models.split import dealt, layers_of

KIND = "meta"  # torch has nothing to start for it, and leaves all computing to the tensors themselves
CARDS = (torch.device(KIND, 0), torch.device(KIND, 1))
COPY = torch.ops.aten.copy_.default
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


class OnCard(torch.Tensor):
    """A CPU tensor that says it is on ``device``."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "OnCard":
        assert inner.device.type == "cpu", f"{inner.device} holds no numbers"
        made: OnCard = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            return args[0].inner.tolist()
        if func is torch.Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if func in (
            torch.Tensor.__getitem__,
            torch.Tensor.__setitem__,
        ):  # torch would make indices of lists out of sight
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = tuple(torch.tensor(place) if isinstance(place, list) else place for place in places)
            args = (args[0], places, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Cards(TorchDispatchMode):
    """Within the block tensors can be made on, and brought to, these cards."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class MadeOnCPU(TorchFunctionMode):
    """Tensors of Python numbers are made on the CPU first: on this kind of device torch would leave the numbers out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            made = func(*args, **{**kwargs, "device": None})
            return made.to(kwargs["device"])
        return func(*args, **kwargs)


@torch.inference_mode(False)  # a view of what was made outside of inference mode is no inference tensor
def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; its result is where the operands are, or where it is told to be."""
    leaves = tree_flatten((args, kwargs))[0]
    given = [each for each in leaves if isinstance(each, torch.Tensor)]
    escaped = [each for each in given if each.device.type == KIND and not isinstance(each, OnCard)]
    assert not escaped, f"{func}: a tensor without numbers"
    copies = func is COPY or func._schema.name in ("aten::to", "aten::_to_copy")
    if not copies:
        _check_one_device(func, args, given)
    told = next((each for each in leaves if isinstance(each, torch.device)), None)
    operand = args[0].device if copies else next((each.device for each in given if each.device.type == KIND), None)
    target = told or operand
    if copies and func is not COPY and target != operand:
        args = (args[0].clone(), *args[1:])  # the other card's memory is another one
    found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if target is None or target.type != KIND:
        return found
    wrapped = tree_map(lambda each: OnCard(each, target) if isinstance(each, torch.Tensor) else each, found)
    if not any(isinstance(each, OnCard) for each in given) or (copies and func is not COPY):
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _inner(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, OnCard) else value


def _check_one_device(func: Any, args: Any, given: Sequence[torch.Tensor]) -> None:
    indices = [each for each in (args[1] if func in INDEXED else ()) if each is not None]
    places = {
        each.device
        for each in given
        if not (each.device.type == "cpu" and (each.ndim == 0 or any(each is index for index in indices)))
    }
    if len(places) > 1:
        raise RuntimeError(f"{func}: tensors on {', '.join(sorted(map(str, places)))}; one device is expected")


class InThisThread:
    """In place of a pool of threads: those would not know these cards."""

    def __init__(self, *_: Any):
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given))
        return done

    def shutdown(self, wait: bool = True) -> None:
        pass


@contextmanager
def movable() -> Iterator[None]:
    """Within the block modules can be moved onto these cards and away; a tied weight is then one for each module."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with Cards(), MadeOnCPU():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def as_ever(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` where these cards are not known, as for a model that is built, on the CPU or without weights."""

    def made(*given: Any) -> Any:
        with _disable_current_modes():
            return make(*given)

    return made


@contextmanager
def on_cards(model: PreTrainedModel, cards: Sequence[torch.device] = CARDS) -> Iterator[PreTrainedModel]:
    """The model with its layers dealt out to the cards, all else on the first; usable within the block."""
    placed = dict.fromkeys(model.modules(), cards[0])
    for layer, card in zip(layers_of(model), dealt(len(layers_of(model)), len(cards)), strict=True):
        placed.update(dict.fromkeys(layer.modules(), cards[card]))
    moved: dict[int, torch.Tensor] = {}  # tied weights once
    with Cards(), MadeOnCPU():
        for module, card in placed.items():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        brought: torch.Tensor = OnCard(tensor.detach(), card)
                        is_weight = isinstance(tensor, nn.Parameter)
                        moved[id(tensor)] = nn.Parameter(brought, requires_grad=False) if is_weight else brought
                    tensors[name] = moved[id(tensor)]
        yield model
