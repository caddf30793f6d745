"""What `make docs` adds to mkdocs: the README as the first page, and links to files of the checkout as plain words.

A page links to code and examples beside docs/, which a site does not hold; on the site these are names. Links between pages stay,
and mkdocs fails the build for one that leads nowhere (strict).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """The README is the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to what is no page becomes its words."""

    def kept(match: re.Match[str]) -> str:
        words, path, _ = match.groups()
        known = not path or "://" in path or files.get_file_from_path(path) is not None
        return match[0] if known else words

    return _LINK.sub(kept, markdown)
