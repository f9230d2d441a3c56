"""Which code an object from outside this package runs: a digest of its byte code and of all that this names.

Knows Python's functions, classes and values as they are in memory, so that a cell of a notebook and a module that was
loaded again count as what they are now; knows no experiment. Comments and places in a file do not count. Code of this
package, of Python's library and of installed packages (but a class's own) counts by its name alone.
"""

import dis
import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Collection, Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from mathinterp.errors import UserError
from mathinterp.text import one_line

OURS = __name__.partition(".")[0]
PLAIN = (type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes)
BY_NAME = (BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType)
INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))
OF_CLASSES = {  # made by Python, some only as a class is used (pickle's __slotnames__), or about a class's text
    "__slotnames__", "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__",
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__",
    "_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__parameters__", "__slots__",
}  # fmt: skip


def is_ours(kind: type) -> bool:
    """Whether a class is of this package."""
    return _top(kind.__module__) == OURS


def has_code(value: Any) -> bool:
    """Whether it can be called, is an object of somebody's class, or contains one."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        return any(map(has_code, value.values() if isinstance(value, dict) else value))
    return callable(value) or _Walk(()).reads(type(value).__module__)


def code_digest(kind: type, *values: Any, left_out: Collection[str] = ()) -> str:
    """12 hex digits of a class, its bases and ``values``, and of all that their code names; alike in any process.

    Args:
        left_out: attributes of the class, and of its bases, that do not matter.
    Raises:
        UserError: the code names an object whose content cannot be told.
    """
    walk = _Walk({_top(base.__module__) for base in kind.__mro__ if not is_ours(base)}, left_out)
    try:
        walk.value((kind, *values))
    except RecursionError:
        raise walk.cannot_tell("nested too deep") from None
    return walk.digest.hexdigest()[:12]


class _Walk:
    """One digest on its way through objects that name each other; each is read once."""

    def __init__(self, own: Collection[str], left_out: Collection[str] = ()):
        self.own, self.left_out = own, left_out
        self.digest = hashlib.sha256()
        self.known: dict[int, tuple[int, Any]] = {}  # by id; held, so that no id is given twice
        self.path: list[str] = []  # names on the way to what is read now

    def reads(self, module: str) -> bool:
        """Whether code of this module may change between two runs of a person who changes no installed package."""
        top = _top(module)
        if top in self.own and top not in sys.stdlib_module_names | {OURS}:
            return True
        if top in sys.stdlib_module_names - {"__main__"} or top in (OURS, "builtins"):
            return False
        found = getattr(sys.modules.get(top), "__spec__", None) or (find_spec(top) if top not in sys.modules else None)
        places = [found.origin, *(found.submodule_search_locations or ())] if found else []
        return not any(Path(place).resolve().is_relative_to(each) for place in places if place for each in INSTALLED)

    def said(self, *texts: object) -> None:
        for text in texts:
            self.digest.update(f"{len(str(text))} {text}".encode("utf-8", "surrogatepass"))

    def named(self, name: str, value: Any) -> None:
        self.path.append(name)
        self.said(name)
        self.value(value)
        self.path.pop()

    def value(self, value: Any) -> None:
        """Read any object: by its name, its code, its items, or as pickle takes it apart."""
        self.said(type(value).__name__)
        if isinstance(value, PLAIN):
            self.said(repr(value))
        elif type(value) in (tuple, frozenset, CodeType):  # which of them are one object, a compiled file may change
            self._anew(value)
        elif id(value) in self.known:
            self.said(self.known[id(value)][0])
        else:
            self.known[id(value)] = (len(self.known), value)
            self._anew(value)

    def cannot_tell(self, why: str) -> UserError:
        place = " of ".join(f"`{name}`" for name in reversed(self.path))
        return UserError(
            f"whether {place} is what it was in an earlier run cannot be told ({one_line(why)}), and rows hang on it;"
            " give the experiment plain parameters, and make such an object inside `prepare`"
        )

    def _anew(self, value: Any) -> None:
        if type(value) in (list, tuple):
            for each in (len(value), *value):
                self.value(each)
        elif type(value) in (set, frozenset):
            self.said(*sorted(self._apart(each) for each in value))
        elif type(value) is dict:
            for key, each in value.items():
                self.value(key)
                self.value(each)
        elif isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, staticmethod | classmethod | MethodType):
            self.value((value.__func__, getattr(value, "__self__", None)))
        elif isinstance(value, property):
            self.value((value.fget, value.fset, value.fdel))
        elif isinstance(value, BY_NAME):
            self.said(value.__qualname__)
        else:
            self._object(value)

    def _apart(self, value: Any) -> str:
        """The digest of one item of a set, whose order means nothing."""
        walk = _Walk(self.own)
        walk.value(value)
        return walk.digest.hexdigest()

    def _class(self, kind: type) -> None:
        self.said(kind.__module__, kind.__qualname__)
        if not self.reads(kind.__module__) or _top(kind.__module__) not in {*sys.modules, *self.own}:
            return  # another's, or one that an extension makes without a module
        for base in kind.__bases__:
            self.value(base)
        for name, value in vars(kind).items():
            if name not in OF_CLASSES and name not in self.left_out:
                self.named(name, value)

    def _module(self, module: ModuleType) -> None:
        """One that is handed on as a whole: its file."""
        self.said(module.__name__)
        if self.reads(module.__name__) and (file := getattr(module, "__file__", None)):
            self.said(hashlib.sha256(Path(file).read_bytes()).hexdigest())

    def _object(self, value: Any) -> None:
        """As pickle takes it apart, with the class's code; a function in a wrapper is read too."""
        self.value(type(value))
        if hasattr(value, "__wrapped__"):
            self.value(value.__wrapped__)
        try:
            taken = value.__reduce_ex__(4)
        except Exception as error:  # whatever objects that cannot be stored raise
            raise self.cannot_tell(str(error)) from error
        self.value(taken if isinstance(taken, str) else [_listed(each) for each in taken])

    def _function(self, function: FunctionType) -> None:
        """By its name if it is another's, but for what it was given of code: a decorator holds the function in it."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.said(function.__qualname__)
        if not self.reads(function.__globals__.get("__name__", "")):
            self.said(function.__code__.co_qualname)
            for name, cell in cells.items():
                if isinstance(found := _content(cell), (FunctionType, type, *PLAIN)):
                    self.named(name, found)
            return
        self.value(function.__code__)
        self.value((function.__defaults__, function.__kwdefaults__))
        for name, cell in cells.items():
            self.named(name, _content(cell))
        for name, value in _globals_of(function.__code__, function.__globals__, self.reads):
            self.named(name, value)

    def _code(self, code: CodeType) -> None:
        self.said(code.co_code.hex(), code.co_exceptiontable.hex(), code.co_flags)
        self.said(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.said(*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
        self.value(code.co_consts)


def _globals_of(code: CodeType, known: dict[str, Any], reads: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the globals that code, and functions inside it, use, and of what they import.

    Of a module that code asks for a part, that part alone: ``helpers.mean`` is no more than ``mean``.
    """
    steps = list(dis.get_instructions(code))
    for place, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in known:
            yield _followed(step.argval, known[step.argval], steps[place + 1 :])
        elif step.opname == "IMPORT_NAME":
            level, parts = steps[place - 2].argval, steps[place - 1].argval
            name = resolve_name("." * level + step.argval, known.get("__package__") or known.get("__name__"))
            if reads(name):
                module = importlib.import_module(name)
                yield from ((f"{name}.{part}", _part(module, part)) for part in parts or ())
                yield (name, module) if not parts else (name, None)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner, known, reads)


def _followed(name: str, value: Any, steps: list[dis.Instruction]) -> tuple[str, Any]:
    """A part of a part of a module, as far as code asks for it by name."""
    for step in steps:
        if not isinstance(value, ModuleType) or step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        name, value = f"{name}.{step.argval}", _part(value, step.argval)
    return name, value


def _part(module: ModuleType, name: str) -> Any:
    """An attribute, or a module inside a package; None if it is neither."""
    if not hasattr(module, name) and hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}"):
        return importlib.import_module(f"{module.__name__}.{name}")
    return getattr(module, name, None)


def _listed(part: Any) -> Any:
    """The items of an object, where pickle gives an iterator."""
    return list(part) if isinstance(part, Iterator) else part


def _content(cell: Any) -> Any:
    """What a closure's cell holds; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _top(module: str) -> str:
    return module.partition(".")[0]
