"""How docstrings become pages: an extension that mkdocs.yml names.

The docstrings are written to be read in a terminal, and run by `doctest`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

# From `>>>` to the next empty line, or the end.
_EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.DOTALL | re.MULTILINE)


class Docstrings(griffe.Extension):
    """Fences examples, and finds the docstrings of `_WhileBuilding("...")`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n",
                obj.docstring.value,
            )

    def on_attribute_instance(
        self, *, node: Any, attr: griffe.Attribute, **_: Any
    ) -> None:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and "_WhileBuilding" in ast.dump(value):
            (text,) = value.args
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                attr.docstring = griffe.Docstring(text.value, parent=attr)
                attr.value = None
                attr.annotation = None
