"""Experiments, prompts and values as plain JSON, and back: what travels in place of a pickle.

Knows dataclasses, tuples and arrays; runs no code that is sent: an object is made again only of a class that this
process has already, in the rooms of OF_OURS or in the module of an experiment that is registered here.
"""

import base64
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mathinterp.errors import UserError, did_you_mean
from mathinterp.experiments import registry
from mathinterp.experiments.base import Experiment
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt

OF_OURS = ("mathinterp.experiments", "mathinterp.prompts", "mathinterp.models.units", "mathinterp.models.spec")
KIND = "~"  # the key that marks an object which JSON has not
NUMBERS = "biuf"  # kinds of NumPy's dtypes that are plain numbers


def encode(value: Any, what: str) -> Any:
    """``value`` as plain JSON; raises UserError naming ``what`` if there is something in it that must stay here."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and type(value) in (int, float):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), what)
    if type(value) is list:
        return [encode(each, what) for each in value]
    if type(value) is tuple:
        return {KIND: "tuple", "of": [encode(each, what) for each in value]}
    if isinstance(value, Mapping):
        return {KIND: "dict", "of": [[encode(key, what), encode(each, what)] for key, each in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "bytes": content}
    if isinstance(value, Path):
        return {KIND: "path", "of": str(value)}
    fields = _fields(type(value))
    if fields is None or not _is_ours(type(value)):
        raise UserError(f"{what} holds a {type(value).__name__}, which cannot be sent to a service; run it here")
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    return {KIND: kind, "fields": {name: encode(getattr(value, name), what) for name in fields}}


def decode(given: Any) -> Any:
    """What ``encode`` was given; raises UserError for anything else."""
    if given is None or isinstance(given, bool | str | int | float):
        return given
    try:
        if isinstance(given, list):
            return [decode(each) for each in given]
        kind = given[KIND]
        if kind == "tuple":
            return tuple(decode(each) for each in given["of"])
        if kind == "dict":
            return {decode(key): decode(each) for key, each in given["of"]}
        if kind == "path":
            return Path(given["of"])
        if kind == "array":
            return _array(given)
        made = _class(kind)
        fields = {name: decode(each) for name, each in given["fields"].items()}
        if fields.keys() != set(_fields(made) or ()):
            raise UserError(f"a {made.__name__} has other fields here; give client and service the same version")
        found = made(**fields)
        if getattr(found, "trust_remote_code", False):
            raise UserError("a service runs no code of a model's folder; leave out `trust_remote_code`")
        return found
    except UserError:
        raise
    except RecursionError as error:
        raise UserError("the request cannot be read: it is nested too deep") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the request cannot be read: {type(error).__name__} {error}") from error


def _array(given: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(str(given["dtype"]))
    if dtype.kind not in NUMBERS:
        raise UserError(f"the request cannot be read: an array of {dtype}")
    return np.frombuffer(base64.b64decode(given["bytes"]), dtype).reshape(given["shape"]).copy()


def decode_experiment(given: Any) -> Experiment:
    """An experiment that is registered here; raises UserError for any other."""
    kind = str(given.get(KIND, "")) if isinstance(given, dict) else ""
    known = _known(kind)
    if known is None:
        likely = did_you_mean(kind.rpartition(":")[2], [each.__name__ for each in _registered()])
        raise UserError(
            f"the service knows no experiment '{kind}'.{likely} It has {', '.join(registry.experiments())}; start it"
            f" with `experiment` {kind or 'module:Class'} for another"
        )
    found = decode(given)
    assert isinstance(found, Experiment)
    return found


def _registered() -> list[type[Experiment]]:
    return list(registry.experiments().values())


def _known(kind: str) -> type[Experiment] | None:
    """The class, if it is one of the command line's experiments or was made known by name."""
    module = kind.partition(":")[0]
    if module in registry.folders() and module.startswith("mathinterp.experiments."):
        found = _class(kind)
        return found if issubclass(found, Experiment) else None
    outside = [each for each in _registered() if not each.__module__.startswith("mathinterp.")]
    return next((each for each in outside if f"{each.__module__}:{each.__qualname__}" == kind), None)


def _class(kind: str) -> type:
    module, _, name = kind.partition(":")
    if not _is_known(module):
        raise UserError(f"the request cannot be read: it holds a '{kind}'")
    try:
        found = getattr(sys.modules.get(module) or importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the request cannot be read: there is no '{kind}' here") from error
    if not inspect.isclass(found) or found.__module__ != module or _fields(found) is None:
        raise UserError(f"the request cannot be read: it holds a '{kind}'")
    return found


def _is_ours(kind: type) -> bool:
    return issubclass(kind, Experiment) or _is_known(kind.__module__)


def _is_known(module: str) -> bool:
    """Whether it is in one of our rooms, or has an experiment that is registered here."""
    ours = any(module == room or module.startswith(f"{room}.") for room in OF_OURS)
    return ours or any(module == each.__module__ for each in _registered())


def _fields(kind: type) -> tuple[str, ...] | None:
    """Names of what a dataclass or a named tuple is made of; None: it is neither."""
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind) if each.init)
    named = getattr(kind, "_fields", None)
    return named if issubclass(kind, tuple) and isinstance(named, tuple) else None


# ---- prompts ----


def encode_prompts(prompts: tuple[TokenizedPrompt, ...]) -> list[list[Any]]:
    """As rows of fields, much shorter than ``encode`` would be."""
    return [
        [
            [getattr(item.prompt, each.name) for each in dataclasses.fields(Prompt)],
            list(item.input_ids),
            [_token_fields(token) for token in item.scored],
            None if item.counterfactual_ids is None else list(item.counterfactual_ids),
            None if item.distractor is None else _token_fields(item.distractor),
        ]
        for item in prompts
    ]


def decode_prompts(given: Any) -> tuple[TokenizedPrompt, ...]:
    """What ``encode_prompts`` was given; raises UserError for anything else."""
    try:
        return tuple(
            TokenizedPrompt(
                _prompt(prompt), tuple(map(int, ids)), tuple(ScoredToken(*token) for token in scored),
                None if counterfactual is None else tuple(map(int, counterfactual)),
                None if distractor is None else ScoredToken(*distractor),
            )
            for prompt, ids, scored, counterfactual, distractor in given
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UserError(f"the request cannot be read: prompts: {error}") from error


def _token_fields(token: ScoredToken) -> list[Any]:
    return [getattr(token, each.name) for each in dataclasses.fields(ScoredToken)]


def _prompt(fields: list[Any]) -> Prompt:
    made = Prompt(*fields)
    return dataclasses.replace(made, token_types=tuple((name, words) for name, words in made.token_types))


# ---- tables ----


def table_bytes(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def bytes_table(content: bytes) -> pa.Table:
    """The table of an Arrow IPC stream."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
