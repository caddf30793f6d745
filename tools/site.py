"""The mkdocs hooks of `make docs`: the README becomes the first page, and links to files of the checkout become plain words.

Pages link to code and examples outside docs/, which are not on the site; there such a link becomes its words. Links between
pages stay, and the strict build fails if one of them leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace each link to a file that is not on the site by its words."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        words, path, _ = match.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        known = not path or "://" in path or files.get_file_from_path(target) is not None
        return match[0] if known else words

    return _LINK.sub(replaced, markdown)
