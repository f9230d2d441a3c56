"""Shows an experiment as its fields, inherited ones too: those made by ``option(default, help)``."""

import ast
import re
from typing import Any

import griffe

OPTION = "option"


class Options(griffe.Extension):
    """For mkdocstrings, which reads the code without running it."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for each field of a class."""
        value = attr.value
        if not (isinstance(value, griffe.ExprCall) and str(value.function) == "option"):
            return
        positional = [each for each in value.arguments if not isinstance(each, griffe.ExprKeyword)]
        default, told = positional
        attr.value = default
        attr.docstring = griffe.Docstring(ast.literal_eval(str(told)), parent=attr)
        attr.extra[OPTION]["help"] = told

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is read: sections of docstrings need a line between them here."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\n+(?=(?:Args|Returns|Raises|Yields):\n)", "\n\n", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when all modules are read."""
        classes = [found for module in _modules(pkg) for found in module.classes.values() if not found.is_alias]
        fields = {found.path: _fields(found) for found in classes}
        for found in classes:
            own = fields[found.path]
            if any(attr.extra.get(OPTION) for attr in own.values()):
                for name in set(found.members) - set(own):
                    found.del_member(name)
                for name in [name for name in own if name not in found.members]:
                    attr = own[name]
                    copy = griffe.Attribute(
                        name, value=attr.value, annotation=attr.annotation, docstring=attr.docstring
                    )
                    found.set_member(name, copy)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [each for each in module.modules.values() if not each.is_alias]
    return [module, *(found for each in inner for found in _modules(each))]


def _fields(found: griffe.Class) -> dict[str, griffe.Attribute]:
    """Its options, and those of the classes that it derives from."""
    fields: dict[str, griffe.Attribute] = {}
    for owner in [found, *found.mro()]:
        own = {name: attr for name, attr in owner.attributes.items() if attr.extra.get(OPTION)}
        fields = {**own, **fields}
    return fields
