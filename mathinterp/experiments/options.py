"""Fields of an experiment that people set: their help, choices and limits, and how text becomes their value.

The command line makes an option of every such field and Python passes values; both say what is wrong in one line. A
message of the library names a field in backticks (`` `heads` ``); the command line shows its flag instead.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from mathinterp.errors import UserError, did_you_mean
from mathinterp.gates import MOST, MOST_LAYERS, real, shortened, whole
from mathinterp.models.units import Head, Neuron

Unit = TypeVar("Unit", Head, Neuron)
KEY = "option"  # of a field's metadata


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known about one field.

    help: one sentence for ``--help``.
    flag: the name on the command line; None = the field's own, with dashes.
    former: names that it had there, which still work and are not shown.
    parse: text -> value, for what is neither text, number, flag nor a choice. Raises UserError.
    choices: the values there are; None among them is left out of the help.
    least, most: smallest and largest number allowed.
    shown: the default as ``--help`` tells it, where the value itself says little.
    metavar: what stands for the value in the help.
    """

    help: str
    flag: str | None = None
    former: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    choices: tuple[str | None, ...] = ()
    least: float | None = None
    most: float = MOST
    shown: str | None = None
    metavar: str | None = None


def option(default: Any, help: str, **about: Any) -> Any:
    """A dataclass field that people set; see Option for ``about``."""
    return dataclasses.field(default=default, metadata={KEY: Option(help, **about)})


def options_of(owner: type) -> dict[str, tuple[dataclasses.Field[Any], Option]]:
    """Name -> field and what is known about it, of a dataclass's settable fields, in order."""
    return {
        each.name: (each, each.metadata[KEY]) for each in dataclasses.fields(owner) if KEY in each.metadata
    }  # fmt: skip


def fields_given(given: Mapping[str, Any], *kinds: type) -> list[Any]:
    """An object of each of these dataclasses from the values given by name.

    Raises UserError for a name that none of them has, or a field without a default that is not given.
    """
    owned = [{each.name: each for each in dataclasses.fields(kind) if each.init} for kind in kinds]
    known = [name for own in owned for name in own]
    for name in given:
        if name not in known:
            raise UserError(f"`{name}` is not known.{did_you_mean(name, known)} There are {', '.join(known)}")
    for own in owned:
        for name, each in own.items():
            if name not in given and each.default is each.default_factory is dataclasses.MISSING:
                raise UserError(f"`{name}` is missing; give it")
    return [
        kind(**{name: value for name, value in given.items() if name in own})
        for kind, own in zip(kinds, owned, strict=True)
    ]


def check_options(value: Any) -> None:
    """Raise UserError for a field that is none of its choices, or no number from its least to its most.

    Call in ``__post_init__``.
    """
    for name, (each, about) in options_of(type(value)).items():
        found = getattr(value, name)
        if about.choices and found not in about.choices:
            known = ", ".join(choice for choice in about.choices if choice is not None)
            raise UserError(f"`{name}` '{found}' is not known; take one of {known}")
        if about.least is not None and found is not None:
            try:
                if "int" in str(each.type):
                    whole(found, int(about.least), about.most)
                else:
                    real(found, about.least, about.most)
            except ValueError as error:
                raise UserError(f"`{name}` {error}") from error


def read_heads(given: str | Iterable[Any] | None, field: str = "heads") -> tuple[Head, ...] | None:
    """Heads in the order given: "17.22,14.19", or texts or pairs; None stays None. Raises UserError."""
    return _units(Head, given, field, "layer.head, like 17.22,14.19")


def read_neurons(given: str | Iterable[Any] | None, field: str = "neurons") -> tuple[Neuron, ...] | None:
    """Neurons in the order given: "28.3696,13.7", or texts or pairs; None stays None. Raises UserError."""
    return _units(Neuron, given, field, "layer.neuron, like 28.3696")


def _units(kind: type[Unit], given: Any, field: str, how: str) -> tuple[Unit, ...] | None:
    if given is None:
        return None
    units = []
    for part in given.split(",") if isinstance(given, str) else given:
        try:
            units.append(kind.read(part) if isinstance(part, str) else kind(*(whole(number) for number in part)))
        except (ValueError, TypeError):
            raise UserError(f"`{field}` '{shortened(part)}' cannot be read; write {how}") from None
    return tuple(units)


def read_layers(given: str | Iterable[int] | None, field: str = "layers") -> tuple[int, ...] | None:
    """Layers, each once, ascending: "0-3,17" -> (0, 1, 2, 3, 17), or numbers; None stays None. Raises UserError."""
    if given is None:
        return None
    layers: set[int] = set()
    for part in given.split(",") if isinstance(given, str) else given:
        low, dash, high = part.strip().partition("-") if isinstance(part, str) else (part, "", None)
        try:
            first = whole(low, most=math.inf)
            last = whole(high, first, math.inf) if dash else first
        except ValueError:
            raise UserError(f"`{field}` '{shortened(given)}' cannot be read; write it like 0-3,17") from None
        if last >= MOST_LAYERS:
            raise UserError(f"`{field}` '{shortened(given)}': no model has a layer {shortened(last)}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def read_counts(given: str | Iterable[int] | None, field: str = "ks", least: int = 0) -> tuple[int, ...] | None:
    """Numbers in the order given: "0,1,2,4" -> (0, 1, 2, 4), "none" -> (); None stays None. Raises UserError."""
    if given is None:
        return None
    try:
        parts: Iterable[Any] = given.split(",") if isinstance(given, str) else given
        return () if given == "none" else tuple(whole(part, least) for part in parts)
    except (ValueError, TypeError):
        raise UserError(
            f"`{field}` '{shortened(given)}' cannot be read; write numbers from {least} on, like 1,2,4"
        ) from None


def normalized(value: Any, **read: Any) -> None:
    """Set fields of a frozen dataclass in its ``__post_init__``, so that text, lists and pairs are all taken."""
    for name, found in read.items():
        object.__setattr__(value, name, found)
