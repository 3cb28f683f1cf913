"""What MkDocs asks us while it builds the site."""

import posixpath
import re
from typing import Any

FILE = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to files outside of `docs`, which are relative in a clone, lead into the repository."""

    def absolute(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[1]))
        return match[0] if path.startswith("docs/") else f"]({config['repo_url']}/blob/main/{path}"

    return FILE.sub(absolute, markdown)
