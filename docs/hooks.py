"""What mkdocs runs while it builds the documentation.

Two pages are files of the folder above, which people also read there. So is a
part of the first page.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

_ROOT = pathlib.Path(__file__).parent.parent
_SHARED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_read_source(page: Any, **_: Any) -> str | None:
    """Returns the text of a page that is a file of the folder above."""
    source = _SHARED.get(page.file.src_uri)
    if source is None:
        return None
    return (_ROOT / source).read_text().replace("](docs/", "](")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Inserts a part of the README, and leaves out what is for the tests."""
    readme = (_ROOT / "README.md").read_text()
    install = readme.partition("## Install\n")[2].partition("\n## ")[0]
    markdown = markdown.replace(
        "See the [README](../README.md#install).",
        install.replace("](docs/", "]("),
    )
    return re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)
