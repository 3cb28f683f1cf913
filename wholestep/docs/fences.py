"""Lets the site show the examples of docstrings as code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)  # up to the next empty line


class Fences(griffe.Extension):
    """Puts every `>>>` example between fences, which Markdown wants and doctest does not."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one class or function."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
