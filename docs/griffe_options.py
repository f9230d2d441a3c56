"""Shows fields made by ``option(default, help)`` as their default and their help."""

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """For mkdocstrings, which reads the code without running it."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for each field of a class."""
        value = attr.value
        if not (isinstance(value, griffe.ExprCall) and str(value.function) == "option"):
            return
        positional = [each for each in value.arguments if not isinstance(each, griffe.ExprKeyword)]
        if len(positional) == 2:
            default, told = positional
            attr.value = default
            attr.docstring = griffe.Docstring(ast.literal_eval(str(told)), parent=attr)
