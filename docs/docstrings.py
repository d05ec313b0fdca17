"""Docstrings as the site wants them: examples are code, roles are names."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?(?:[\w.]*\.)?([\w()]+)`")
EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class Extension(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", ROLE.sub(r"`\1`", obj.docstring.value))
