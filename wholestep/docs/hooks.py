"""What MkDocs asks us while it builds a site."""

import posixpath
import re
from pathlib import Path
from typing import Any

FILE = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to files outside of `docs`, which are relative in a clone, lead into the
    repository.
    """
    docs = f"{Path(config.config_file_path).parent.name}/docs"
    folder = posixpath.join(docs, posixpath.dirname(page.file.src_uri))

    def absolute(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        is_page = path.startswith(f"{docs}/")
        return match[0] if is_page else f"]({config['repo_url']}/blob/main/{path}"

    return FILE.sub(absolute, markdown)
